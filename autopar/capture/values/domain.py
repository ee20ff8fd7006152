"""Define the rows that ``nonzero`` finds: all positions of a mask, with a mark for those that count.

The number of rows that ``nonzero`` finds depends on the values of its mask. Here all positions are rows, in the same
order, and those where the mask is false count nothing: whoever adds rows up adds zero for them. A row that does not
depend on all dims of the mask is there once for the others: of ``x[token]`` with a mask ``[choice token]`` there is one
row for each token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.capture.values.later import Later


@dataclass(eq=False)
class Domain:
    """The positions of one mask.

    Attributes:
        mask: bool, of shape ``sizes``.
        line: the user's line that asks for them.
        source: the tensor whose nonzero positions they are.
        under: the conditions that its mask has in it already.
        part: for a piece of a split by sizes that are values: all pieces, and which one this is.
    """

    mask: Later
    sizes: tuple[int, ...]
    line: str
    source: torch.Tensor | None = None
    under: tuple[Any, ...] = ()
    part: tuple[list[Domain], int] | None = None

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(range(len(self.sizes)))

    def count(self, support: Sequence[int]) -> int:
        """Return the number of rows that depend on these dims."""
        return math.prod(self.sizes[d] for d in support)


def coordinate(mask: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the positions along one dim of a mask: ``[sizes[dim]]``."""
    return torch.arange(mask.shape[dim], device=mask.device)


def widened(
    x: torch.Tensor, at: int, sizes: tuple[int, ...], have: tuple[int, ...], want: tuple[int, ...]
) -> torch.Tensor:
    """Repeat rows along dims of the mask: dim ``at`` is over the dims ``have``, and then over ``want``."""
    shape = x.shape
    x = x.reshape(*shape[:at], *(sizes[d] if d in have else 1 for d in want), *shape[at + 1 :])
    x = x.expand(*shape[:at], *(sizes[d] for d in want), *shape[at + 1 :])
    return x.reshape(*shape[:at], math.prod(sizes[d] for d in want), *shape[at + 1 :])


def counted(
    x: torch.Tensor,
    mask: torch.Tensor,
    at: int,
    sizes: tuple[int, ...],
    support: tuple[int, ...],
    kept: tuple[int, ...],
) -> torch.Tensor:
    """Add up the rows that count, over all dims of the mask but ``kept``, which take the place of dim ``at``."""
    before, after = x.shape[:at], x.shape[at + 1 :]
    x = x.reshape(*before, *(size if d in support else 1 for d, size in enumerate(sizes)), *after)
    mask = mask.reshape(*(1 for _ in before), *sizes, *(1 for _ in after))
    x = torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))
    gone = [at + d for d in range(len(sizes)) if d not in kept]
    return x.sum(gone) if gone else x


def taken(x: torch.Tensor, dims: tuple[int, ...], at: int) -> torch.Tensor:
    """Return the rows of ``x`` at all positions of ``dims``, given in the order of the mask; they become dim ``at``."""
    x = x.movedim(dims, tuple(range(at, at + len(dims)))) if dims != tuple(range(at, at + len(dims))) else x
    return x.flatten(at, at + len(dims) - 1) if len(dims) > 1 else x


def looked_up(x: torch.Tensor, before: int, mask: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
    """Index the dims of ``x`` after ``before`` by rows; rows that do not count look up position 0."""
    kept = mask.flatten()
    zero = torch.zeros((), dtype=torch.long, device=mask.device)
    found = [torch.where(kept, index, zero) for index in indices]
    index: tuple[Any, ...] = (*[slice(None)] * before, *found)
    return x[index]


def replaced(
    x: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor, dims: tuple[int, ...], kept: tuple[int, ...]
) -> torch.Tensor:
    """Return ``x`` with the rows that count in place of its own; where several are for one place, the last one counts.

    Args:
        mask: of shape ``sizes``. rows: ``[sizes…, rest]``, for the dims ``dims`` of ``x``, which ``kept`` run over.
    """
    x = x.movedim(dims, tuple(range(len(dims)))) if dims else x
    others = [d for d in range(mask.dim()) if d not in kept]
    order = (*others, *kept)
    mask, rows = mask.permute(order), rows.permute(*order, *range(mask.dim(), rows.dim()))
    mask, rows = (
        mask.flatten(0, len(others) - 1) if others else mask[None],
        rows.flatten(0, len(others) - 1) if others else rows[None],
    )
    for turn in range(mask.shape[0]):
        counts = mask[turn].reshape(*mask.shape[1:], *(1 for _ in range(x.dim() - len(kept))))
        x = torch.where(counts, rows[turn].to(x.dtype), x)
    return x.movedim(tuple(range(len(dims))), dims) if dims else x
