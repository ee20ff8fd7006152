"""Call functions that have rows among their arguments."""

from __future__ import annotations

from typing import Any

import torch

from autopar.capture.provenance import user_line
from autopar.capture.values.domain import Domain
from autopar.capture.values.later import Later
from autopar.capture.values.lines import adds_at, users_frame
from autopar.capture.values.masks import mask_in, positions, with_positions
from autopar.capture.values.reduced import batch_normed, reduced, without_reduction
from autopar.capture.values.rows import Count, Element, Keeper, Rows, Sizes
from autopar.capture.values.rowwise import RANDOM, REMEDIES, Mixed, name_of, results
from autopar.capture.values.selected import gathered
from autopar.capture.values.split import pieces, put_together
from autopar.capture.values.written import written
from autopar.torch_private import pytree

KEEP_ROWS = frozenset({"linear", "matmul", "mul", "add", "dropout"})  # whose results view no operand


def on_rows(mode: Keeper, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that has rows, their number, or the element of a loop among its arguments."""
    mode.conditions.close_ended()
    leaves = pytree.tree_leaves((args, kwargs))
    mode.conditions.check(leaves)
    mode.sums.finish([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], _adds(function, args))
    name = name_of(function)
    if name in ("__getitem__", "__setitem__") and (mask := mask_in(args[1])) is not None:
        args = (args[0], with_positions(mode, args[1], mask), *args[2:])
    if name == "__getitem__" and isinstance(args[1], Element) and isinstance(args[0], torch.Tensor):
        args = (args[0], _possible(mode, args[1], args[0].shape[0]))
    args, kwargs = _with_numbers(name, args, kwargs)
    rows = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Rows)]
    if not rows and not any(isinstance(arg, Sizes) for arg in (*args, *kwargs.values())):
        again = mode.of_values(name, function, args, kwargs)
        return again[0] if again is not None else _element(mode, name, function, args, kwargs)
    if name in ("split", "split_with_sizes") and not rows:
        return pieces(mode, *args, **kwargs)
    if any(one.domain is not rows[0].domain for one in rows):
        together = put_together(mode, name, args, kwargs)
        if together is not None:
            return together
        raise mode.refuse(
            f"combines rows that different masks select, with {name.strip('_')}", "select them by one mask"
        )
    if name == "__getitem__" and not isinstance(args[0], Rows):
        return gathered(mode, args[0], args[1])
    if (done := written(mode, name, args, kwargs)) is not None:
        return done[0]
    if name == "batch_norm" and kwargs.get("training") and isinstance(args[0], Rows):
        return batch_normed(mode, *args, **kwargs)
    if (how := without_reduction(function, args, kwargs)) is not None:
        each = rowwise(mode, function, args, {**kwargs, "reduction": "none"}, rows)
        return on_rows(mode, torch.Tensor.sum if how == "sum" else torch.Tensor.mean, (each,), {})
    if (whole := reduced(mode, function, args, kwargs)) is not None:
        return whole
    if name == "__getitem__" and (column := _column(*args)) is not None:
        return positions(mode, rows[0].domain, column)
    if name in ("squeeze", "flatten", "view", "reshape") and rows[0].coordinates and rows[0].sizes == (None, 1):
        return positions(mode, rows[0].domain, rows[0].coordinates[0])
    return rowwise(mode, function, args, kwargs, rows)


def _adds(function: Any, args: Any) -> Any:
    """Return the tensor that a call only adds to, so that earlier sums into it need not be finished."""
    name = name_of(function)
    frame = users_frame() if name in ("__getitem__", "__setitem__") else None
    return args[0] if name == "index_add_" or (frame is not None and adds_at(frame)) else None


def _possible(mode: Keeper, element: Element, size: int) -> Element:
    """Return an element below ``size``. A turn of an element that is not cannot count: eager raises an error."""
    if element.item() < size:
        return element
    mode.unchecked(user_line())
    element.made_under[-1].impossible = True
    return Element((size - 1,), element.shape)


def _element(mode: Keeper, name: str, function: Any, args: Any, kwargs: Any) -> Any:
    if name == "__getitem__" and isinstance(args[1], _One):
        selected = mode.plain(torch.Tensor.__getitem__, (args[0], args[1].number), {})
        return mode.plain(torch.Tensor.unsqueeze, (selected, 0), {})
    return mode.plain(function, args, kwargs)


def rowwise(mode: Keeper, function: Any, args: Any, kwargs: Any, rows: list[Rows]) -> Any:
    """Call a function that computes each row by itself."""
    name = name_of(function)
    try:
        spec, found = results(function, args, kwargs)
    except Mixed:
        raise mode.refuse(
            f"computes {name.strip('_')} of the rows that a mask selects, and it may mix rows",
            REMEDIES.get(name, REMEDIES[""]),
        ) from None
    support = tuple(sorted({d for one in rows for d in one.support}))
    domain = rows[0].domain
    new_args, new_kwargs = pytree.tree_map_only(
        (Rows, torch.Tensor, Count), lambda x: operand(mode, x, support, domain), (args, kwargs)
    )
    in_place = name.startswith("__i") and name.endswith("__") and name != "__invert__"
    function = getattr(torch.Tensor, "__" + name[3:]) if in_place else function
    random = name in RANDOM and _draws(*args, **kwargs)
    count = domain.count(support)
    whole = Later(function, new_args, new_kwargs, place=mode.place(), random=random, rows=count)
    made = []
    for k, result in enumerate(found):
        value = whole if spec.is_leaf() else Later(_leaf, (whole, k), place=mode.place())
        like = torch.empty(0, dtype=result.dtype, device=rows[0].device)
        made.append(Rows(mode, domain, value, result.sizes, result.at, support, like))
    mode.conditions.note_made(made)
    if in_place:
        if args[0].shared or args[0].sizes != made[0].sizes:
            raise mode.refuse("writes into rows that other values view", "write x = x + 1 instead of x += 1")
        args[0].value, args[0].support, args[0].coordinates = made[0].value, support, None
        return args[0]
    for one in (*rows, *made):
        one.shared = one.shared or name not in KEEP_ROWS
    return pytree.tree_unflatten(made, spec)


def _draws(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """Return whether a dropout draws random numbers."""
    return bool(training) and p > 0


def operand(mode: Keeper, x: Any, support: tuple[int, ...], domain: Domain) -> Any:
    """Return what a value is in a computation with rows that depend on these dims of the mask."""
    if isinstance(x, Count):
        return domain.count(support)
    return mode.widened(x, support) if isinstance(x, Rows) else Later.of(x)


class _One:
    """The index of one position, which keeps its dim."""

    def __init__(self, number: int) -> None:
        self.number = number


def _with_numbers(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace elements of loops by their numbers."""
    if name == "__getitem__" and isinstance(args[1], Element) and args[1].shape:
        return (args[0], _One(args[1].item())), kwargs
    if name in ("__getitem__", "__setitem__") and isinstance(args[1], tuple):
        index = tuple((x.item() if not x.shape else [x.item()]) if isinstance(x, Element) else x for x in args[1])
        args = (args[0], index, *args[2:])
    return pytree.tree_map_only(Element, Element.item, (args, kwargs))


def _column(x: Any, index: Any) -> int | None:
    """Return which dim of the mask ``x[:, index]`` has the positions of, for the result of ``nonzero``."""
    table = isinstance(x, Rows) and len(x.sizes) == 2 and isinstance(index, tuple) and len(index) == 2
    if table and x.coordinates and index[0] == slice(None) and type(index[1]) is int:
        return x.coordinates[index[1]]
    return None


def _leaf(results: Any, index: int) -> Any:
    return pytree.tree_leaves(results)[index]
