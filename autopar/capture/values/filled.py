"""Write a plain tensor at the positions of a mask: ``h[mask, 0] = token`` is a choice between it and what was there.

h[mask] = token        →        h = where(mask[:, None], token, h)
h[mask] = rows         →        h = masked_scatter(h, mask[:, None], rows)
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.capture.provenance import user_line
from autopar.capture.values.masks import mask_in
from autopar.capture.values.rows import Keeper


def filled(mode: Keeper, x: torch.Tensor, index: Any, value: Any, accumulate: bool = False) -> torch.Tensor | None:
    """Return ``x`` with ``value`` at the positions that an index with one mask selects; ``None`` for another index.

    Rows in order, as many as there are positions, are put there in order; their number is not checked.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    mask = mask_in(tuple(entries))
    plain = [entry for entry in entries if entry is not mask]
    simple = all(entry is None or entry is Ellipsis or type(entry) in (int, slice) for entry in plain)
    if mask is None or not simple or not isinstance(value, torch.Tensor):
        return None
    if value.dim() and value.dtype != x.dtype:
        raise mode.refuse(
            f"writes {value.dtype} at the positions of a mask into {x.dtype}, which eager does not take either",
            "convert the value: value.to(x.dtype)",
        )
    mode.sums.finish_all()
    at, shape = _expanded(entries, mask, x)
    view = mode.plain(torch.Tensor.__getitem__, (x, shape), {}) if plain else x
    before, after = view.shape[:at], view.shape[at + mask.dim() :]
    if tuple(view.shape[at : at + mask.dim()]) != tuple(mask.shape):
        return None
    whole = mask.reshape(*(1 for _ in before), *mask.shape, *(1 for _ in after))
    value = value.to(x.dtype)
    while value.dim() > len(before) + 1 + len(after) and value.shape[0] == 1:
        value = value[0]
    along = value.dim() - len(after) - 1  # the dim of the value that is over the positions
    if along >= 0 and value.shape[along] != 1:
        if accumulate:
            return None
        mode.unchecked(user_line())
        rows = value.expand(*before, value.shape[along], *after)
        new = view.masked_scatter(whole.expand_as(view), rows)
    else:
        if along >= 0:
            value = value.reshape(*value.shape[:along], *(1 for _ in mask.shape), *value.shape[along + 1 :])
        new = torch.where(whole, view + value if accumulate else value, view)
    mode.plain(torch.Tensor.copy_, (view, new), {})
    return x


def _expanded(entries: list[Any], mask: torch.Tensor, x: torch.Tensor) -> tuple[int, tuple[Any, ...]]:
    """Return which dim of the view has the mask's first dim, and the index of the view, with all of the mask's dims."""
    used = sum(mask.dim() if entry is mask else entry is not None and entry is not Ellipsis for entry in entries)
    full: list[Any] = []
    for entry in entries:
        if entry is Ellipsis:
            full += [slice(None)] * (x.dim() - used)
        elif entry is mask:
            at = sum(not isinstance(each, int) for each in full)
            full += [slice(None)] * mask.dim()
        else:
            full.append(entry)
    return at, tuple(full)
