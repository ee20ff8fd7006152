"""Write rows that a mask selects into a tensor, so that only those that count do.

``out.index_add_(0, rows, values)`` adds up the rows that count.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F

from autopar.capture.values.domain import Domain, counted, replaced, taken, widened
from autopar.capture.values.later import Later, parts
from autopar.capture.values.rows import Keeper, Rows
from autopar.capture.values.rowwise import PRODUCTS, name_of
from autopar.capture.values.sums import Sum
from autopar.torch_private import storage_of


def written(mode: Keeper, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
    """Do what a call writes with rows, and return its result in a tuple; ``None`` for another call."""
    if name == "index_add_" and not isinstance(args[0], Rows):
        named = dict(zip(("self", "dim", "index", "source"), args, strict=False)) | kwargs
        return (_add_rows(mode, named),)
    if name == "__setitem__" and not isinstance(args[0], Rows):
        _put_rows(mode, *args)
        return (None,)
    if name in ("sum", "mean") and isinstance(args[0], Rows):
        return _of_rows(mode, name, *args, **kwargs)
    if name == "cross_entropy":
        return (_cross_entropy(mode, *args, **kwargs),)
    return None


def _add_rows(mode: Keeper, named: dict[str, Any]) -> torch.Tensor:
    out, dim, index, source = (named[key] for key in ("self", "dim", "index", "source"))
    if not isinstance(index, Rows) or not isinstance(source, Rows) or named.get("alpha", 1) != 1:
        raise mode.refuse(
            "adds rows that a mask selects in a way that is not known", "use out.index_add_(0, rows, values)"
        )
    dim %= out.dim()
    domain, place = source.domain, mode.place()
    along = index.coordinates
    if source.at != dim or along is None or len(index.sizes) != 1 or domain.sizes[along[0]] > out.shape[dim]:
        raise mode.refuse(
            "adds rows at positions that are not those of the mask", "use the positions that nonzero gives"
        )
    how = (dim, domain.sizes, source.support, (along[0],))
    value = Later(counted, (source.value, _mask(mode, domain, out), *how), place=place)
    size = domain.sizes[along[0]]
    mode.sums.add(
        Sum(
            out,
            dim,
            size,
            value,
            rows_of(source.value),
            domain.count(domain.dims),
            place[1],
            tuple(mode.conditions.open),
        )
    )
    return out


def _mask(mode: Keeper, domain: Domain, into: torch.Tensor) -> Later:
    """Return which rows count where they are written: only under the conditions that ``into`` is older than."""
    mask = domain.mask
    for condition in mode.conditions.outside(into):
        if condition not in domain.under and (condition.of is None or condition.of is not domain.source):
            mask = Later(operator.and_, (mask, condition.value), place=mode.place())
    return mask


def rows_of(value: Later) -> int:
    """Return for how many rows the matrix products of a value are computed."""
    found, open_, seen = 0, [value], set()
    while open_:
        one = open_.pop()
        if id(one) not in seen:
            seen.add(id(one))
            if name_of(one.function) in PRODUCTS:
                found = max(found, one.rows)
            open_ += [leaf for leaf in parts(one)[0] if isinstance(leaf, Later)]
    return found


def _put_rows(mode: Keeper, x: torch.Tensor, index: Any, value: Any) -> None:
    index = index if isinstance(index, tuple) else (index,)
    rows = [entry for entry in index if isinstance(entry, Rows)]
    plain = [entry for entry in index if not isinstance(entry, Rows)]
    if plain and index[: len(rows)] == tuple(rows) and all(type(entry) in (int, slice) for entry in plain):
        x = mode.plain(torch.Tensor.__getitem__, (x, (*(slice(None) for _ in rows), *plain)), {})
        plain = []
    if not rows or plain or any(row.coordinates is None or len(row.sizes) != 1 for row in rows):
        raise mode.refuse(
            "writes at rows that a mask selects in a way that is not known", "use out.index_add_(0, rows, values)"
        )
    domain = rows[0].domain
    along = tuple(row.coordinates[0] for row in rows)  # type: ignore[index]
    if len(set(along)) < len(along) or any(domain.sizes[d] != x.shape[k] for k, d in enumerate(along)):
        raise mode.refuse("writes at positions that are not those of the mask", "use the positions that nonzero gives")
    if _unique(mode, domain, along) and (added := _added(mode, x, along, value)) is not None:
        how = (0, domain.sizes, domain.dims, along)
        total = Later(counted, (added, _mask(mode, domain, x), *how), place=mode.place())
        under = tuple(mode.conditions.open)
        size = domain.count(along)
        mode.sums.add(Sum(x, 0, size, total, rows_of(added), domain.count(domain.dims), mode.place()[1], under))
        return
    if not _unique(mode, domain, along):
        raise mode.refuse(
            "writes rows that a mask selects, perhaps several at one place", "use out.index_add_(0, rows, values)"
        )
    mode.sums.finish_all()
    mask = mode.evaluator.now(_mask(mode, domain, x))
    rest = x.shape[len(along) :]
    if isinstance(value, Rows):
        if value.at:
            raise mode.refuse("writes rows whose first dim is another", "move the rows to the first dim")
        whole = mode.evaluator.now(mode.widened(value, domain.dims))
        whole = whole.reshape(*domain.sizes, *whole.shape[1:]).expand(*domain.sizes, *rest)
    else:
        number = torch.as_tensor(value, dtype=x.dtype, device=x.device)
        if number.dim() > len(rest):
            raise mode.refuse(
                "writes as many rows as a mask selects from another tensor", "use x.masked_scatter(mask, rows)"
            )
        whole = number.expand(*domain.sizes, *rest)
    order = tuple(along.index(d) for d in sorted(along))
    with mode.recorder.placed(mode.place()):
        x.copy_(replaced(x, mask, whole, order, tuple(sorted(along))))


def _added(mode: Keeper, x: torch.Tensor, along: tuple[int, ...], value: Any) -> Later | None:
    """Return what ``x[rows] += value`` adds; ``None`` if the value is no sum with what was there."""
    if (
        not isinstance(value, Rows)
        or len(along) != 1
        or value.at
        or name_of(value.value.function) not in ("add", "__add__")
    ):
        return None
    old, new, *rest = value.value.args
    if isinstance(old, Later) and name_of(old.function) == "widened":
        old = old.args[0]
    if (
        rest
        or value.value.kwargs
        or not isinstance(old, Later)
        or old.function is not taken
        or not isinstance(new, Later)
        or new.function is None  # a plain tensor, the same for all rows
    ):
        return None
    source = old.args[0]
    same = (
        isinstance(source.tensor, torch.Tensor) and storage_of(source.tensor) == storage_of(x) and not source.changed()
    )
    if not same or source.tensor.shape != x.shape or old.args[1] != (0,):
        return None
    how = (0, value.domain.sizes, value.support, value.domain.dims)
    return new if value.support == value.domain.dims else Later(widened, (new, *how), place=mode.place())


def _unique(mode: Keeper, domain: Domain, along: tuple[int, ...]) -> bool:
    """Return whether no two rows that count have one position along these dims: the others are choices that differ."""
    others = [d for d in domain.dims if d not in along]
    if not others:
        return True
    made = mode.histories.get(domain.source) if domain.source is not None else None
    if made is None or name_of(made.function) not in ("eq", "__eq__") or type(made.args[1]) is not int:
        return False
    choices = made.args[0].tensor
    return others == [mode.distinct.get(choices)] and not made.args[0].changed()


def _of_rows(mode: Keeper, name: str, rows: Rows, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """Return the sum or the mean over the rows that count; ``None`` if it is not over the rows."""
    dims = (
        range(rows.dim())
        if dim is None
        else [d % rows.dim() for d in (dim if isinstance(dim, (tuple, list)) else [dim])]
    )
    if rows.at not in dims:
        return None
    if kwargs.get("dtype") is not None or keepdim:
        raise mode.refuse(
            f"computes the {name} of rows that a mask selects, with keepdim or dtype",
            "compute with all rows, and choose with torch.where",
        )
    domain = rows.domain
    total = Later(counted, (rows.value, domain.mask, rows.at, domain.sizes, rows.support, ()), place=mode.place())
    result = mode.evaluator.now(total)
    if rows.support != domain.dims:
        result = mode.evaluator.now(
            Later(counted, (mode.widened(rows, domain.dims), domain.mask, rows.at, domain.sizes, domain.dims, ()))
        )
    others = [d - (d > rows.at) for d in dims if d != rows.at]
    size = 1
    for d in dims:
        size *= rows.sizes[d] or 1
    result = result.sum(others) if others else result
    if name == "mean":
        result = result / (mode.evaluator.now(domain.mask).sum() * size)
    mode.conditions.note_made([result])
    return (result,)


def _cross_entropy(mode: Keeper, scores: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute the loss of the rows that count: the others have the class that is ignored."""
    ignored = kwargs.get("ignore_index", -100)
    known = kwargs.get("reduction", "mean") in ("mean", "sum") and not args
    if not (isinstance(scores, Rows) and isinstance(target, Rows)) or scores.at or target.sizes != (None,) or not known:
        raise mode.refuse(
            "computes the loss of rows that a mask selects in a way that is not known",
            "give the other rows the class ignore_index",
        )
    domain: Domain = scores.domain
    mask = mode.evaluator.now(domain.mask).flatten()
    classes = mode.evaluator.now(mode.widened(target, domain.dims))
    classes = torch.where(mask, classes, torch.full((), ignored, dtype=classes.dtype, device=classes.device))
    result = F.cross_entropy(mode.evaluator.now(mode.widened(scores, domain.dims)), classes, **kwargs)
    mode.conditions.note_made([result])
    return result
