"""The least that any transfers can bring the worst rank: what sequences of them are measured by.

Between splits it is what a rank needs and does not hold. For a reduction over p ranks, ``(p-1)/p`` of what each holds, the
bound of a reduce-scatter (Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms*, JPDC 2009), after which each has
``1/p`` of it, at best all in its new piece: for an all-reduce that makes the ``2 (p-1)/p`` of a ring. Where r groups of ranks
hold the same, each need reduce no more than ``1/r`` of it. What stays pending is not reduced.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

from autopar.boxes import box_of, count, overlap, volume
from autopar.layout import DistAttr, Layout
from autopar.record import TensorType


def least_bytes(source: TensorType, target: TensorType) -> int:
    """Bytes that the worst rank receives at least; casts are where they make it fewer.

    What becomes pending is made of pieces or of the whole value, whichever is less.
    """
    assert source.layout is not None and target.layout is not None
    here, there = source.layout, target.layout
    held, wanted = dict(here.attr.pending), dict(there.attr.pending)
    same = here.mesh == there.mesh
    kept = {axis for axis in held if same and held[axis] == wanted.get(axis)}
    p = here.mesh.count(axis for axis in held if axis not in kept)
    narrow = min(source.dtype.itemsize, target.dtype.itemsize)
    largest = max((volume(box_of(here, source.shape, rank)) for rank in here.mesh.ranks), default=0)
    shares = p if p == 1 else here.mesh.size // here.mesh.count(axis for axis in here.attr.axes if axis in kept or axis not in held)
    reduced = Fraction(largest * (p - 1), shares) * source.dtype.itemsize
    new = [axis for axis in wanted if axis not in kept]
    lacked = min(_lacked(here, split, source.shape, shares) for split in _ends(there, target.shape, new))
    return math.ceil((reduced + lacked * narrow) / narrow) * narrow  # whole elements


def _ends(layout: Layout, shape: tuple[int, ...], new: list[str]) -> list[Layout]:
    """What a pending value can be made of: it is whole over each new axis, or split over it anywhere."""
    parts = layout.attr.parts(shape)
    found = []
    for places in itertools.product([None, *range(len(parts))], repeat=len(new)):
        splits = [list(axes) for _, axes in parts]
        for axis, place in zip(new, places, strict=True):
            if place is not None:
                splits[place].append(axis)
        flat = iter(splits)
        dims = tuple(tuple((size, tuple(next(flat))) for size, _ in dim) for dim in layout.attr.dims)
        found.append(Layout(layout.mesh, DistAttr(dims)))
    return found


def _lacked(here: Layout, there: Layout, shape: tuple[int, ...], shares: int) -> Fraction:
    """Elements that the worst rank lacks, when each has one of ``shares`` of what it held, in its new piece if it can be."""
    worst = Fraction(0)
    for rank in there.mesh.ranks:
        need = box_of(there, shape, rank)
        if rank not in here.mesh:
            worst = max(worst, Fraction(volume(need)))
            continue
        have = box_of(here, shape, rank)
        both = math.prod(count(overlap(a, b)) for a, b in zip(need, have, strict=True))
        worst = max(worst, volume(need) - min(Fraction(both), Fraction(volume(have), shares)))
    return worst
