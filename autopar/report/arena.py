"""Plan an arena: one block of memory in which every value of a step has a fixed place.

Values that are in use at the same time have disjoint places; others may share a place. The planner is greedy by size
with best fit: the largest value first, each into the smallest gap that is large enough (Pisarchyk and Lee,
arXiv:2001.03288). No plan needs less than the peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.report.liveness import Storage


@dataclass(frozen=True)
class Arena:
    """The place of each storage.

    Attributes:
        bytes: the size of the whole block.
        offsets: storage → the byte at which it begins.
    """

    bytes: int
    offsets: Mapping[Storage, int]


def arena(storages: Sequence[Storage], align: int = 1) -> Arena:
    """Assign places to storages, each at a multiple of ``align`` bytes. Quadratic in their number, in numpy."""
    ordered = sorted(
        (storage for storage in storages if storage.bytes),
        key=lambda storage: (-storage.bytes, storage.born, storage.dies),
    )
    rows = np.zeros((4, len(ordered)), dtype=np.int64)  # born, dies, begin, end of placed storages, sorted by begin
    offsets: dict[Storage, int] = dict.fromkeys(storages, 0)
    top = 0
    for count, storage in enumerate(ordered):
        size = -(-storage.bytes // align) * align
        born, dies, begins, ends = rows[:, :count]
        together = (born <= storage.dies) & (dies >= storage.born)
        begins, ends = begins[together], ends[together]
        free_from = np.concatenate(([0], np.maximum.accumulate(ends)))
        gaps = np.concatenate((begins, [np.iinfo(np.int64).max])) - free_from
        fits = np.flatnonzero(gaps >= size)
        place = int(free_from[fits[np.argmin(gaps[fits])]])
        at = int(np.searchsorted(rows[2, :count], place))
        rows[:, at + 1 : count + 1] = rows[:, at:count].copy()
        rows[:, at] = storage.born, storage.dies, place, place + size
        offsets[storage] = place
        top = max(top, place + size)
    return Arena(top, offsets)
