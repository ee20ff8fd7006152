"""Split a tensor by sizes that are values, and put the pieces together again.

A piece is all rows of the tensor, of which those in the piece count. ``torch.cat`` of all pieces in order takes each
row from the piece in which it counts.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.capture.values.domain import Domain, counted
from autopar.capture.values.later import Later
from autopar.capture.values.rows import Keeper, Rows, Sizes


def pieces(mode: Keeper, x: Any, sizes: Any, dim: int = 0) -> tuple[Rows, ...]:
    """Return the pieces of these sizes; it is not checked that they add up to the size of the dim."""
    if not isinstance(x, torch.Tensor) or not isinstance(sizes, Sizes):
        raise mode.refuse("splits by a number that is a value", "split by the list that tolist() gives of all sizes")
    dim %= x.dim()
    length = x.shape[dim]
    if length not in sizes.whole:
        mode.unchecked(mode.place()[1])
        whole = Later.of(sizes.tensor)
        ends = Later(torch.cumsum, (whole, 0), place=mode.place())
        domains: list[Domain] = []
        for k in range(len(sizes)):
            size, end = (Later(torch.Tensor.__getitem__, (table, k)) for table in (whole, ends))
            mask = Later(_between, (size, end, length), place=mode.place())
            domains.append(Domain(mask, (length,), mode.place()[1], part=(domains, k)))
        sizes.whole[length] = domains
    shape = [None if d == dim else size for d, size in enumerate(x.shape)]
    return tuple(Rows(mode, domain, Later.of(x), tuple(shape), dim, (0,), x) for domain in sizes.whole[length])


def _between(size: torch.Tensor, end: torch.Tensor, length: int) -> torch.Tensor:
    places = torch.arange(length, device=end.device)
    return (places >= end - size) & (places < end)


def put_together(mode: Keeper, name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Return the concatenation of all pieces of a split; ``None`` for another call."""
    named = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
    rows, dim = named.get("tensors"), named.get("dim", 0)
    if (
        name not in ("cat", "concat")
        or not isinstance(rows, (list, tuple))
        or not all(isinstance(r, Rows) for r in rows)
    ):
        return None
    dim %= rows[0].dim()
    whole, _ = rows[0].domain.part or ([], 0)
    in_order = len(rows) == len(whole) and all(row.domain is domain for row, domain in zip(rows, whole, strict=False))
    if not in_order or any(row.at != dim for row in rows):
        return None
    values = [
        Later(counted, (row.value, row.domain.mask, dim, row.domain.sizes, row.support, (0,)), place=mode.place())
        for row in rows
    ]
    batch = mode.evaluator.together(values, mode.histories)
    length = whole[0].sizes[0]
    mode.recorder.note_rows(mode.place()[1], len(rows), len(rows) * length, length)
    result: torch.Tensor = batch.sum(0) if batch is not None else sum(map(mode.evaluator.now, values))
    mode.conditions.note_made([result])
    return result
