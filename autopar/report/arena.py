"""Arena: one block of memory in which everything that a step makes has a fixed place.

What is in use at the same time lies side by side, and what is not may lie in the same place. Greedy by size, best fit: the largest
first, each into the smallest gap that takes it (Pisarchyk and Lee, arXiv:2001.03288). No plan needs less than the peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.report.liveness import Storage


@dataclass(frozen=True)
class Arena:
    """Where each storage lies.

    Attributes:
        bytes: of the whole block.
        offsets: storage → where it begins.
    """

    bytes: int
    offsets: Mapping[Storage, int]


def arena(storages: Sequence[Storage], align: int = 1) -> Arena:
    """Places for storages; each begins at a multiple of ``align`` bytes. Quadratic in their number, in numpy."""
    ordered = sorted((one for one in storages if one.bytes), key=lambda one: (-one.bytes, one.born, one.dies))
    rows = np.zeros((4, len(ordered)), dtype=np.int64)  # born, dies, begin, end of those that have a place, by where they begin
    offsets: dict[Storage, int] = dict.fromkeys(storages, 0)
    top = 0
    for count, one in enumerate(ordered):
        size = -(-one.bytes // align) * align
        born, dies, begins, ends = rows[:, :count]
        together = (born <= one.dies) & (dies >= one.born)
        begins, ends = begins[together], ends[together]
        free_from = np.concatenate(([0], np.maximum.accumulate(ends)))
        gaps = np.concatenate((begins, [np.iinfo(np.int64).max])) - free_from
        fits = np.flatnonzero(gaps >= size)
        place = int(free_from[fits[np.argmin(gaps[fits])]])
        at = int(np.searchsorted(rows[2, :count], place))
        rows[:, at + 1 : count + 1] = rows[:, at:count].copy()
        rows[:, at] = one.born, one.dies, place, place + size
        offsets[one] = place
        top = max(top, place + size)
    return Arena(top, offsets)
