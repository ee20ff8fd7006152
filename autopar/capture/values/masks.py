"""Find the rows that a mask selects: with ``nonzero``, ``torch.where(mask)``, by indexing, in loops."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch

from autopar.capture.provenance import user_line
from autopar.capture.values.conditions import Condition
from autopar.capture.values.domain import Domain, coordinate
from autopar.capture.values.later import Later, alike
from autopar.capture.values.lines import leaves_early, loop_at, stored_names, users_frame
from autopar.capture.values.rows import Element, Keeper, Rows
from autopar.torch_private import version_of

RECENT = 8  # masks that a new mask is compared with
MOST_TURNS = 1024  # of a loop over what nonzero finds


def nonzero(mode: Keeper, mask: torch.Tensor, as_tuple: bool) -> Any:
    """Return the positions of a mask: for each dim, or in one table ``[rows dims]``."""
    domain = domain_of(mode, mask)
    rows = [positions(mode, domain, d) for d in domain.dims]
    if as_tuple:
        return tuple(rows)
    table = Later(_columns, tuple(row.value for row in rows), place=mode.place())
    whole = Rows(mode, domain, table, (None, len(rows)), 0, domain.dims, rows[0].like, domain.dims)
    mode.conditions.note_made([whole])
    return whole


def domain_of(mode: Keeper, mask: torch.Tensor) -> Domain:
    """Return the rows of a mask. Under a condition they count only where it holds."""
    if not mask.dim():
        raise mode.refuse("asks for the nonzero positions of a number", "compare it with zero")
    key = (version_of(mask), *mode.conditions.open)
    if mask in mode.domains and mode.domains[mask][0] == key:
        return mode.domains[mask][1]
    for other, (known, domain) in list(mode.domains.items())[-RECENT:]:
        if known == (version_of(other), *mode.conditions.open) and alike(mode.histories, mask, other):
            return domain
    value = Later(_truths, (Later.of(mask),), place=mode.place())
    under = tuple(mode.conditions.open)
    for condition in under:
        if condition.of is not mask:
            value = Later(operator.and_, (value, condition.value), place=mode.place())
    domain = Domain(value, tuple(mask.shape), user_line(), source=mask, under=under)
    mode.domains[mask] = key, domain
    return domain


def positions(mode: Keeper, domain: Domain, dim: int) -> Rows:
    """Return the positions along one dim of a mask."""
    value = Later(coordinate, (domain.mask,), {"dim": dim}, place=mode.place())
    like = torch.empty(0, dtype=torch.long, device=_device(domain))
    rows = Rows(mode, domain, value, (None,), 0, (dim,), like, (dim,))
    mode.conditions.note_made([rows])
    return rows


def _device(domain: Domain) -> torch.device:
    value = domain.mask
    while value.tensor is None:
        value = value.args[0]
    device: torch.device = value.tensor.device
    return device


def with_positions(mode: Keeper, index: Any, mask: torch.Tensor) -> Any:
    """Replace a mask in an index by its positions."""
    domain = domain_of(mode, mask)
    rows = tuple(positions(mode, domain, d) for d in domain.dims)
    index = index if isinstance(index, tuple) else (index,)
    return tuple(part for one in index for part in (rows if one is mask else (one,)))


def turns(mode: Keeper, rows: Rows) -> Iterator[Any]:
    """Run a loop over the positions of a mask: a turn for each, under the condition that it counts."""
    sizes, frame = rows.domain.sizes, users_frame()
    loop = loop_at(frame) if frame is not None else None
    if frame is None or loop is None or rows.coordinates is None or rows.at or len(sizes) != 1:
        raise mode.refuse("loops over rows that a mask selects", "compute with all of them at once")
    if sizes[0] > MOST_TURNS or leaves_early(loop.body):
        raise mode.refuse("loops over positions of a mask, and may leave the loop", "loop over all positions")
    mask = Later(_same, (rows.domain.mask,))
    for turn in range(sizes[0]):
        hit = Later(torch.Tensor.__getitem__, (mask, turn), place=mode.place())
        condition = Condition(hit, user_line(), frame, None, stored_names(loop.body))
        mode.conditions.add(condition)
        element = Element((turn,), (1,) if len(rows.sizes) == 2 else ())
        mode.conditions.note_made([element])
        yield element
        if condition.impossible:
            mode.sums.drop(condition)
        mode.conditions.close(condition)


def mask_in(index: Any) -> torch.Tensor | None:
    """Return the mask of truths in an index, if there is one."""
    index = index if isinstance(index, tuple) else (index,)
    masks = [x for x in index if isinstance(x, torch.Tensor) and x.dtype is torch.bool and x.dim()]
    return masks[0] if len(masks) == 1 else None


def _truths(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype is torch.bool else mask != 0


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _columns(*positions: torch.Tensor) -> torch.Tensor:
    return torch.stack([x.flatten() for x in torch.meshgrid(*positions, indexing="ij")], -1)
