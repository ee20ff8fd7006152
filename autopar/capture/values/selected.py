"""Select rows of a tensor: ``x[positions]``, where the positions are rows that a mask selects."""

from __future__ import annotations

from typing import Any

import torch

from autopar.capture.values.domain import looked_up, taken
from autopar.capture.values.later import Later
from autopar.capture.values.rows import Keeper, Rows


def gathered(mode: Keeper, x: torch.Tensor, index: Any) -> Rows:
    """Return ``x[index]`` with rows in the index, without a gather where the rows are all positions of a dim."""
    entries = _entries(mode, x, index)
    view = mode.plain(
        torch.Tensor.__getitem__, (x, tuple(slice(None) if isinstance(e, Rows) else e for e in entries)), {}
    )
    dims, dim = [], 0  # where the rows are in the view
    for entry in entries:
        if isinstance(entry, Rows):
            dims.append(dim)
        dim += not isinstance(entry, int)
    rows = [entry for entry in entries if isinstance(entry, Rows)]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    at = dims[0] if adjacent else 0
    domain, place = rows[0].domain, mode.place()
    sizes = [size for d, size in enumerate(view.shape) if d not in dims]
    sizes.insert(at, None)
    if all(row.coordinates for row in rows):
        along = [row.coordinates[0] for row in rows]  # type: ignore[index]
        if len(set(along)) == len(along) and all(
            view.shape[d] == domain.sizes[a] for d, a in zip(dims, along, strict=True)
        ):
            support = tuple(sorted(along))
            source = tuple(dims[along.index(d)] for d in support)
            value = Later(taken, (Later.of(view), source, at), place=place)
            return _made(mode, Rows(mode, domain, value, tuple(sizes), at, support, view))
    if not adjacent:
        raise mode.refuse("indexes dims that are apart by rows that a mask selects", "move the dims together first")
    support = domain.dims
    indices = [mode.widened(row, support) for row in rows]
    value = Later(looked_up, (Later.of(view), at, domain.mask, *indices), place=place)
    return _made(mode, Rows(mode, domain, value, tuple(sizes), at, support, view))


def _made(mode: Keeper, rows: Rows) -> Rows:
    mode.conditions.note_made([rows])
    return rows


def _entries(mode: Keeper, x: torch.Tensor, index: Any) -> list[Any]:
    """Return the entries of an index, one for each dim, without an ellipsis."""
    entries = list(index) if isinstance(index, tuple) else [index]
    for entry in entries:
        rows = isinstance(entry, Rows) and entry.sizes == (None,)
        if not rows and entry is not None and entry is not Ellipsis and not isinstance(entry, (slice, int)):
            raise mode.refuse("indexes by rows that a mask selects and by another tensor", "index in two steps")
    used = sum(entry is not None and entry is not Ellipsis for entry in entries)
    position = next((k for k, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    entries[position : position + 1] = [slice(None)] * (x.dim() - used)
    return entries
