"""Compute the fewest bytes that any transfers can bring the worst rank, as a bound for the chosen ones.

Between splits, the bound is the number of elements that a rank needs and does not hold. If a value becomes pending, the
ranks with its addends need each element once together.

To reduce p addends of V elements each, a rank that sums ``s`` elements receives ``(p-1) s`` addends. Then it receives,
as sums, the other elements of the ``w`` that it wants: ``(p-1) s + w - s`` in all, if it wants the sums that it makes.
All ranks together make V sums. If no rank may receive more than t, this limits how many sums each can make; the bound
is the least t for which these add up to V. For an all-reduce this is the ``2 (p-1)/p`` of a ring, for a reduce-scatter
half of it (Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms*, JPDC 2009). With r replicas of the addends,
and no wanted elements, it is ``1/r`` of that. Axes that stay pending are not reduced.
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
    """Ranks whose results are addends of one value.

    Attributes:
        ranks: the number of ranks.
        wanted: the number of elements that they need together.
        available: the number of these that the ranks hold, summed over different pieces; addends, if the value is to
            be reduced.
    """

    ranks: int
    wanted: int
    available: int


def least_bytes(source: TensorType, target: TensorType) -> int:
    """Return the bytes that the worst rank receives at least; casts are placed where they save most."""
    assert source.layout is not None and target.layout is not None
    source_layout, target_layout = source.layout, target.layout
    pending, target_pending = dict(source_layout.attr.pending), dict(target_layout.attr.pending)
    is_same_mesh = source_layout.mesh == target_layout.mesh
    still_pending = {axis for axis in pending if is_same_mesh and pending[axis] == target_pending.get(axis)}
    addends = source_layout.mesh.count(axis for axis in pending if axis not in still_pending)
    groups = list(
        _groups(
            source_layout,
            target_layout,
            source.shape,
            tuple(axis for axis in target_pending if axis not in still_pending),
        )
    )
    narrow = min(source.dtype.itemsize, target.dtype.itemsize)
    if addends == 1:
        return max((-(-(group.wanted - group.available) // group.ranks) for group in groups), default=0) * narrow
    elements = math.prod(source.shape) * source_layout.mesh.count(still_pending)
    return _least_reduced(groups, elements, addends, source.dtype.itemsize, narrow)


def _least_reduced(groups: list[_Group], elements: int, addends: int, wide: int, narrow: int) -> int:
    """Return the least t with which all ranks together can sum all elements.

    It is counted in elements of the narrower dtype.
    """
    # bytes that a sum costs, on a rank that wants it or not
    own_sum, other_sum = ((addends - 1) * wide - narrow, (addends - 1) * wide)

    def summed(t: int) -> Fraction:
        total = Fraction(0)
        for group in groups:
            left = group.ranks * t * narrow - group.wanted * narrow
            if left < 0:
                return Fraction(-1)
            cheap = min(Fraction(group.available), Fraction(left, own_sum) if own_sum else Fraction(group.available))
            total += cheap + (left - cheap * own_sum) / other_sum
        return total

    low, high = 0, 1
    while summed(high) < elements:
        high *= 2
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if summed(middle) < elements else (low, middle)
    return low * narrow


def _groups(source: Layout, target: Layout, shape: tuple[int, ...], new: tuple[str, ...]) -> Iterator[_Group]:
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in target.mesh.ranks:
        at = target.mesh.coordinates(rank)
        members.setdefault(tuple(at[axis] for axis in target.mesh.names if axis not in new), []).append(rank)
    for ranks in members.values():
        need = box_of(target, shape, ranks[0])
        # pieces: equal, or nothing in common
        boxes = {box_of(source, shape, rank) for rank in ranks if rank in source.mesh.ranks}
        yield _Group(len(ranks), volume(need), sum(_common(need, box) for box in boxes))
    for _ in range(len(set(source.mesh.ranks) - set(target.mesh.ranks))):
        yield _Group(1, 0, 0)


def _common(left: Box, right: Box) -> int:
    return math.prod(count(overlap(a, b)) for a, b in zip(left, right, strict=True))
