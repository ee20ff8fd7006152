"""Index by a tensor of one number, ``h[:, t]``, and by a mask whose values are known, without reading values.

h[:, t]        →        h[:, t.reshape(1)][:, 0]
h[mask]        →        h[positions], where the mask is the same in each call
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.capture.provenance import user_line
from autopar.capture.values.known import KnownValues
from autopar.capture.values.rows import Keeper
from autopar.torch_private import without_function_modes, without_modes


def by_numbers(mode: Keeper, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of ``__getitem__`` or ``__setitem__`` without tensors of one whole number in the index."""
    x, index, *value = args
    entries = list(index) if isinstance(index, tuple) else [index]
    numbers = [k for k, entry in enumerate(entries) if _is_number(entry)]
    if not numbers or not isinstance(x, torch.Tensor):
        return args
    if name == "__setitem__":
        if len(numbers) > 1 or any(isinstance(e, (torch.Tensor, list)) and not _is_number(e) for e in entries):
            raise mode.refuse("writes at several positions that are tensors", "write in two steps: h[i][j] = value")
        (k,) = numbers
        after = _dims_of(entries, x, slice(k + 1, None), made=True)
        entries[k] = entries[k].reshape(1)
        if isinstance(value[0], torch.Tensor) and value[0].dim() >= after:
            value[0] = value[0].unsqueeze(-after - 1)
        return x, tuple(entries), *value
    for k in reversed(numbers):
        dim = _dims_of(entries, x, slice(k), made=False)
        before = (slice(None),) * dim
        x = mode.plain(torch.Tensor.__getitem__, (x, (*before, entries.pop(k).reshape(1))), {})
        x = mode.plain(torch.Tensor.select, (x, dim, 0), {})
    return x, tuple(entries) or Ellipsis


def _is_number(entry: Any) -> bool:
    whole = isinstance(entry, torch.Tensor) and not entry.dim() and entry.dtype not in (torch.bool, torch.uint8)
    return whole and not entry.is_floating_point() and not entry.is_complex()


def _dims_of(entries: list[Any], x: torch.Tensor, part: slice, made: bool) -> int:
    """Return how many dims of ``x`` a part of an index is for; with ``made``, how many it makes."""

    def used(entry: Any) -> int:
        if entry is None or entry is Ellipsis:
            return 0
        return entry.dim() if isinstance(entry, torch.Tensor) and entry.dtype is torch.bool else 1

    rest = x.dim() - sum(map(used, entries))
    ellipsis = any(entry is Ellipsis for entry in entries)
    count = 0
    for entry in entries[part]:
        count += rest if entry is Ellipsis else used(entry)
        if made:
            count += (entry is None) - (type(entry) is int)
    return count + (rest if made and not ellipsis else 0)


def known_positions(mode: Keeper, constant: KnownValues, mask: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Return the positions of a mask that is the same in each call; ``None`` for another mask.

    A mask that a buffer makes is checked in each call.
    """
    values = None if mode.conditions.open else constant.tensor(mask)
    if values is None:
        return None
    with without_modes(), without_function_modes():
        truths, found = values.tolist(), [each.tolist() for each in values.nonzero(as_tuple=True)]
    if constant.is_given(mask):
        mode.assume((mask != torch.tensor(truths, device=mask.device)).any().long(), user_line())
    return tuple(torch.tensor(each, dtype=torch.long, device=mask.device) for each in found)
