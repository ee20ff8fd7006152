"""Reduce over the rows that a mask selects: the other rows get a value that changes nothing.

h[mask].amax(0)          →        where(mask[:, None], h, -inf).amax(0)
h[mask].t() @ g[mask]    →        where(mask[:, None], h, 0).t() @ where(mask[:, None], g, 0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar.capture.provenance import user_line
from autopar.capture.values.later import Later
from autopar.capture.values.rows import Keeper, Rows
from autopar.capture.values.rowwise import LOSSES, Mixed, name_of, probed
from autopar.torch_private import pytree


def _lowest(dtype: torch.dtype) -> Any:
    return -math.inf if dtype.is_floating_point else dtype is not torch.bool and torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> Any:
    return math.inf if dtype.is_floating_point else dtype is torch.bool or torch.iinfo(dtype).max


NEUTRAL: dict[str, Callable[[torch.dtype], Any]] = {
    "norm": lambda _: 0, "linalg_vector_norm": lambda _: 0, "logsumexp": _lowest, "amax": _lowest, "max": _lowest,
    "amin": _highest, "min": _highest, "prod": lambda _: 1, "any": lambda _: 0, "all": lambda _: 1,
}  # fmt: skip
OF_NONE = frozenset({"amax", "amin", "max", "min"})  # eager raises an error where no row is selected


def filled_with(mode: Keeper, rows: Rows, value: Any) -> torch.Tensor:
    """Return all rows, with ``value`` in those that do not count."""
    domain = rows.domain
    whole = mode.evaluator.now(mode.widened(rows, domain.dims))
    mask = _mask_of(mode, rows)
    return torch.where(mask, whole, torch.full((), value, dtype=whole.dtype, device=whole.device))


def _mask_of(mode: Keeper, rows: Rows) -> torch.Tensor:
    mask = mode.evaluator.now(rows.domain.mask).flatten()
    return mask.reshape(*(1 for _ in range(rows.at)), -1, *(1 for _ in range(rows.dim() - rows.at - 1)))


def reduced(mode: Keeper, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return what a call reduces the rows to that count; ``None`` for a call that does not reduce over them."""
    name = name_of(function)
    if name in ("matmul", "__matmul__", "mm") and len(args) == 2 and not kwargs:
        return _product(mode, function, *args)
    if name not in NEUTRAL or not isinstance(args[0], Rows) or not _reduces(function, args, kwargs):
        return None
    if "norm" in name and not _is_power(kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else 2))):
        return None
    if name in OF_NONE:
        mode.unchecked(user_line())
    result: torch.Tensor = function(filled_with(mode, args[0], NEUTRAL[name](args[0].dtype)), *args[1:], **kwargs)
    return _made(mode, result)


def _is_power(power: Any) -> bool:
    return power is None or power == "fro" or (isinstance(power, (int, float)) and power >= 0)


def _reduces(function: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call gives one tensor whose shape does not depend on the number of rows."""
    if any(isinstance(value, Rows) for value in pytree.tree_leaves((args[1:], dict(kwargs)))):
        return False
    try:
        first, second = probed(function, args, kwargs)
    except Mixed:
        return False
    return len(first) == 1 and isinstance(first[0], torch.Tensor) and first[0].shape == second[0].shape


def _product(mode: Keeper, function: Any, a: Any, b: Any) -> torch.Tensor | None:
    both = isinstance(a, Rows) and isinstance(b, Rows) and a.domain is b.domain
    if not both or a.dim() > 2 or b.dim() > 2 or a.at != a.dim() - 1 or b.at:
        return None
    return _made(mode, function(filled_with(mode, a, 0), filled_with(mode, b, 0)))


def _made(mode: Keeper, result: torch.Tensor) -> torch.Tensor:
    mode.conditions.note_made([result])
    return result


def without_reduction(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return how a loss of each element is reduced over the rows; ``None`` for another call."""
    how = kwargs.get("reduction", "mean")
    old = any(kwargs.get(each) is not None for each in ("size_average", "reduce"))
    known = name_of(function) in LOSSES and len(args) == 2 and not old and how in ("mean", "sum")
    return how if known else None


def batch_normed(
    mode: Keeper, rows: Rows, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Rows:  # fmt: skip
    """Normalize by the statistics of the rows that count, and update the running ones."""
    if rows.at or rows.dim() < 2:
        raise mode.refuse("normalizes rows that a mask selects over another dim", "move the rows to the first dim")
    if mode.conditions.open:
        raise mode.refuse("calls batch_norm only for some values of a tensor, and it writes", "call it always")
    mode.unchecked(user_line())  # eager raises an error where one row alone is selected
    dims = [d for d in range(rows.dim()) if d != 1]
    each = [1, -1, *(1 for _ in range(rows.dim() - 2))]
    whole, mask = filled_with(mode, rows, 0), _mask_of(mode, rows)
    count = mask.sum().to(whole.dtype) * math.prod(size or 1 for size in rows.sizes[2:])
    some = count.clamp(min=1)  # without rows nothing is normalized, and nothing is added to the statistics
    mean = whole.sum(dims) / some
    centred = torch.where(mask, whole - mean.reshape(each), torch.zeros((), dtype=whole.dtype, device=whole.device))
    variance = centred.square().sum(dims) / some
    for running, now in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
        if running is not None:
            next_value = torch.where(count > 0, running * (1 - momentum) + momentum * now.detach(), running)
            mode.plain(torch.Tensor.copy_, (running, next_value.to(running.dtype)), {})
    result = centred * torch.rsqrt(variance + eps).reshape(each)
    result = result if weight is None else result * weight.reshape(each)
    result = result if bias is None else result + bias.reshape(each)
    made = Rows(mode, rows.domain, Later.of(result), rows.sizes, 0, rows.domain.dims, rows.like)
    mode.conditions.note_made([made])
    return made
