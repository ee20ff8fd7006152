"""The least that any transfers can bring the worst rank: what sequences of them are measured by.

Between splits it is what a rank needs and does not hold. What becomes pending is needed once by all of its addends together.

To reduce p addends of each of V elements, some rank that sums ``s`` of them receives ``(p-1) s`` addends, and then the
rest of the ``w`` that it wants, as sums: ``(p-1) s + w - s`` where they are its own. All ranks together sum V. If none may
receive more than t, each can sum so many; the bound is the least t by which that is enough. For an all-reduce this is the
``2 (p-1)/p`` of a ring, for a reduce-scatter its half (Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms*,
JPDC 2009); with r replicas of the addends, and nothing wanted, ``1/r`` of it. What stays pending is not reduced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from autopar.ir.boxes import Box, box_of, count, overlap, volume
from autopar.ir.layout import Layout
from autopar.ir.record import TensorType


@dataclass(frozen=True)
class _Group:
    """Ranks whose results are addends of each other.

    Attributes:
        ranks: how many.
        wanted: elements that they need together.
        held: of those, how many each holds, all together; addends, if they are to be reduced.
    """

    ranks: int
    wanted: int
    held: int


def least_bytes(source: TensorType, target: TensorType) -> int:
    """Bytes that the worst rank receives at least; casts are where they make it fewer."""
    assert source.layout is not None and target.layout is not None
    here, there = source.layout, target.layout
    held, wanted = dict(here.attr.pending), dict(there.attr.pending)
    same = here.mesh == there.mesh
    kept = {axis for axis in held if same and held[axis] == wanted.get(axis)}
    addends = here.mesh.count(axis for axis in held if axis not in kept)
    groups = list(_groups(here, there, source.shape, tuple(axis for axis in wanted if axis not in kept)))
    narrow = min(source.dtype.itemsize, target.dtype.itemsize)
    if addends == 1:
        return max((-(-(group.wanted - group.held) // group.ranks) for group in groups), default=0) * narrow
    elements = math.prod(source.shape) * here.mesh.count(kept)
    return _least_reduced(groups, elements, addends, source.dtype.itemsize, narrow)


def _least_reduced(groups: list[_Group], elements: int, addends: int, wide: int, narrow: int) -> int:
    """The least t, in elements of the narrower dtype, by which all ranks together can sum all elements."""
    own, other = (addends - 1) * wide - narrow, (addends - 1) * wide  # bytes that a sum costs, wanted on the rank or not

    def summed(t: int) -> Fraction:
        total = Fraction(0)
        for group in groups:
            left = group.ranks * t * narrow - group.wanted * narrow
            if left < 0:
                return Fraction(-1)
            cheap = min(Fraction(group.held), Fraction(left, own) if own else Fraction(group.held))
            total += cheap + (left - cheap * own) / other
        return total

    low, high = 0, 1
    while summed(high) < elements:
        high *= 2
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if summed(middle) < elements else (low, middle)
    return low * narrow


def _groups(here: Layout, there: Layout, shape: tuple[int, ...], new: tuple[str, ...]) -> Iterator[_Group]:
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in there.mesh.ranks:
        at = there.mesh.coordinates(rank)
        members.setdefault(tuple(at[axis] for axis in there.mesh.names if axis not in new), []).append(rank)
    for ranks in members.values():
        need = box_of(there, shape, ranks[0])
        boxes = {box_of(here, shape, rank) for rank in ranks if rank in here.mesh.ranks}  # pieces: equal, or nothing in common
        yield _Group(len(ranks), volume(need), sum(_common(need, box) for box in boxes))
    for _ in range(len(set(here.mesh.ranks) - set(there.mesh.ranks))):
        yield _Group(1, 0, 0)


def _common(one: Box, other: Box) -> int:
    return math.prod(count(overlap(a, b)) for a, b in zip(one, other, strict=True))
