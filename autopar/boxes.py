"""Boxes: which elements of a value each rank holds, and what has to travel from one Layout to another.

A piece is a product of index sets, one for each dim; each set is a few *runs* of indices, ``(start, stop)``: one for a
plain dim, more where a part behind the first of a merged dim is split. What a rank lacks is the difference of two such
products, so bytes are counted dim by dim, for all ranks at once. Both Layouts may lie on one mesh or on two.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np

from autopar.layout import Axes, Dim, Layout, in_common, span
from autopar.mesh import Mesh

Runs = tuple[tuple[int, int], ...]  # sorted, disjoint, not empty: (start, stop)


# -- index sets ---------------------------------------------------------------------------------------------------


def runs_of(dim: Dim, size: int, mesh: Mesh, at: Mapping[str, int]) -> Runs:
    """The indices of a dim that the rank at ``at`` holds, in the order in which they lie in its piece."""
    return _runs(tuple((size if n is None else n, *span(size if n is None else n, axes, mesh, at)) for n, axes in dim))


@lru_cache(maxsize=65536)
def _runs(parts: tuple[tuple[int, int, int], ...]) -> Runs:
    """Of parts (size, start, length), major first."""
    runs: list[tuple[int, int]] = [(0, 1)]
    inner = 1
    for size, start, length in reversed(parts):
        if length == 0 or not runs:
            return ()
        if runs == [(0, inner)]:
            runs = [(start * inner, (start + length) * inner)]
        else:
            runs = [(a + k * inner, b + k * inner) for k in range(start, start + length) for a, b in runs]
        inner *= size
    return tuple(runs) if inner else ()


def count(runs: Runs) -> int:
    return sum(b - a for a, b in runs)


@lru_cache(maxsize=65536)
def overlap(one: Runs, other: Runs) -> Runs:
    """The indices in both."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        a, b = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if a < b:
            found.append((a, b))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def within(part: Runs, whole: Runs) -> Runs:
    """Where the indices ``part`` lie among ``whole``, which holds them all: positions, as runs."""
    found: list[tuple[int, int]] = []
    before, rest = 0, iter(whole)
    a, b = next(rest, (0, 0))
    for start, stop in part:
        while stop > b:
            before += b - a
            a, b = next(rest)
        first, last = before + start - a, before + stop - a
        found[-1:] = [(found[-1][0], last)] if found and found[-1][1] == first else [*found[-1:], (first, last)]
    return tuple(found)


Box = tuple[Runs, ...]  # one set of indices for each dim


def box_of(layout: Layout, shape: Sequence[int], rank: int) -> Box:
    """What ``rank`` holds; its mesh knows it."""
    at = layout.mesh.coordinates(rank)
    return tuple(runs_of(dim, n, layout.mesh, at) for n, dim in zip(shape, layout.attr.dims, strict=True))


def volume(box: Box) -> int:
    return math.prod(count(runs) for runs in box)


# -- counting -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=65536)
def most_lacked(source: Layout, target: Layout, shape: tuple[int, ...]) -> int:
    """Elements that the worst rank needs and does not hold: no transfers can bring it less.

    What is pending stays so on both sides; on one mesh that is not counted, because all its coordinates are alike.
    """
    if source.mesh != target.mesh:
        return max(
            volume(need) - (0 if have is None else math.prod(count(overlap(a, b)) for a, b in zip(have, need, strict=True)))
            for rank in target.mesh.ranks
            for need in (box_of(target, shape, rank),)
            for have in (box_of(source, shape, rank) if rank in source.mesh.ranks else None,)
        )
    mesh = source.mesh
    needed = held = 1
    for n, have, want in zip(shape, source.attr.dims, target.attr.dims, strict=True):
        more, both = _sizes(have, want, n, mesh)
        needed, held = needed * more, held * both
    return int(np.max(needed - held))


def _sizes(have: Dim, want: Dim, size: int, mesh: Mesh) -> tuple[np.ndarray | int, np.ndarray | int]:
    """Of one dim, for every point of the mesh: how many indices the target has, and how many both have."""
    seen = ((size, have[0][1], want[0][1]),) if len(have) == len(want) == 1 else in_common(have, want, size, mesh)
    if seen is None:
        return _counted(have, want, size, mesh)
    needed: np.ndarray | int = 1
    held: np.ndarray | int = 1
    for n, own, wanted in seen:
        if own or wanted:
            (a, p), (b, q) = _spans(n, own, mesh), _spans(n, wanted, mesh)
            needed, held = needed * q, held * np.maximum(np.minimum(a + p, b + q) - np.maximum(a, b), 0)
        else:
            needed, held = needed * n, held * n
    return needed, held


def _counted(have: Dim, want: Dim, size: int, mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
    """``_sizes`` of dims that are made of no common parts, point by point."""
    used = {axis for dim in (have, want) for _, axes in dim for axis in axes}
    grid = [range(p) if axis in used else range(1) for axis, p in mesh.axes]
    pairs = []
    for point in itertools.product(*grid):
        at = dict(zip(mesh.names, point, strict=True))
        wanted = runs_of(want, size, mesh, at)
        pairs.append((count(wanted), count(overlap(runs_of(have, size, mesh, at), wanted))))
    found = np.array(pairs, dtype=np.int64).reshape(*map(len, grid), 2)
    return found[..., 0], found[..., 1]


@lru_cache(maxsize=4096)
def _spans(size: int, axes: Axes, mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
    """``layout.span`` for all coordinates: start and length, with one dimension for each axis of the mesh."""
    start, length = np.zeros((1,) * len(mesh.axes), dtype=np.int64), np.full((1,) * len(mesh.axes), size, dtype=np.int64)
    for axis in axes:
        p = mesh.sizes[axis]
        index = np.arange(p).reshape([p if name == axis else 1 for name in mesh.names])
        step = -(-length // p)
        offset = np.minimum(index * step, length)
        start, length = start + offset, np.minimum(step, length - offset)
    return start, length


# -- messages -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    """What one rank sends to another: a box of the value."""

    sender: int
    receiver: int
    box: Box

    @cached_property
    def elements(self) -> int:
        return volume(self.box)


LEAST = 1 << 18  # elements of a part of a divided box: a MiB or so, which a link moves while one more message starts


@lru_cache(maxsize=4096)
def messages(
    source: Layout, target: Layout, shape: tuple[int, ...], kept: tuple[str, ...] = (), *, least: int = LEAST
) -> tuple[Message, ...]:
    """What travels: to each rank what it needs and lacks, each element once, from one of the ranks that hold it.

    Replicas share the work: of those that hold a box, the one that has least to send so far sends it, then the nearest
    (``_whole``). Between meshes, where a few ranks may need what many hold, large boxes are divided, so that each sends
    an equal share (``_in_shares``); on one mesh, where all ranks need, they stay whole. In one order for all ranks,
    (receiver, sender), at most one message for each: ranks that send and receive in that order, one after the other,
    finish even where a send waits for its receive.

    Args:
        kept: axes over which the value is pending; messages stay within one coordinate of each.
        least: elements below which a box is not divided.
    """
    holders: dict[tuple[tuple[int, ...], Box], list[int]] = {}
    for rank in source.mesh.ranks:
        box = box_of(source, shape, rank)
        if volume(box):
            holders.setdefault((_point(source.mesh, rank, kept), box), []).append(rank)
    # dim by dim, the index sets that occur and those who have them: only boxes that overlap are looked at
    wanted: dict[tuple[tuple[int, ...], Box], list[Need]] = {}
    own = {rank: box for (_, box), ranks in holders.items() for rank in ranks}
    sets = [dict.fromkeys(box[d] for _, box in holders) for d in range(len(shape))]
    for rank in target.mesh.ranks:
        need, where = box_of(target, shape, rank), _point(target.mesh, rank, kept)
        if not volume(need):
            continue
        found = [[(part, both) for part in sets[d] if (both := overlap(part, need[d]))] for d in range(len(shape))]
        for pieces in itertools.product(*found):
            box = tuple(part for part, _ in pieces)
            if own.get(rank) != box and (where, box) in holders:
                wanted.setdefault((where, box), []).append((rank, tuple(both for _, both in pieces)))
    sent: list[Message] = []
    points = {rank: _point(source.mesh, rank, source.mesh.names) for rank in source.mesh.ranks} if source.mesh == target.mesh else {}
    for key, needs in wanted.items():
        divided = source.mesh != target.mesh and any(volume(box) >= 2 * least for _, box in needs)
        sent += _in_shares(holders[key], sorted(needs), least) if divided else _whole(holders[key], needs, points)
    return tuple(sorted(sent, key=lambda message: (message.receiver, message.sender)))


Need = tuple[int, Box]  # a receiver, and what it needs of one box


def _whole(holders: Sequence[int], needs: Sequence[Need], points: Mapping[int, tuple[int, ...]]) -> Iterator[Message]:
    """The largest first, each from the holder with the least to send so far; of those from the nearest.

    On one mesh, whose ``points`` are given, that is the one on the same side of the outer axes: links along them are
    slower, and an axis along which nothing travels need not be in the exchange.
    """
    load = dict.fromkeys(holders, 0)
    for rank, box in sorted(needs, key=lambda need: -volume(need[1])):
        here = points.get(rank, ())
        nearest = ((load[holder], tuple(map(operator.ne, here, points.get(holder, ()))), abs(holder - rank), holder) for holder in holders)
        *_, sender = min(nearest)
        load[sender] += volume(box)
        yield Message(sender, rank, box)


def _in_shares(holders: Sequence[int], needs: Sequence[Need], least: int) -> Iterator[Message]:
    """The needs in a row, cut into one stretch for each holder: equal shares in the fewest parts, and near ranks meet.

    McNaughton's wrap-around rule (Scheduling with deadlines and loss functions, 1959). No part is smaller than
    ``least``: there are no more stretches than that allows, and what is left whole goes to where its middle lies.
    """
    total = sum(volume(box) for _, box in needs)
    near = sorted(holders, key=lambda holder: min(abs(holder - rank) for rank, _ in needs))
    holders = sorted(near[: total // least])
    share = Fraction(total, len(holders))
    begin = 0
    for rank, box in needs:
        end, cuts = begin + volume(box), [begin]
        for k in range(int(begin / share) + 1, math.ceil(end / share)):
            if k * share - cuts[-1] >= least and end - k * share >= least:
                cuts.append(k * share)
        for (a, b), part in zip(itertools.pairwise([*cuts, end]), _cut(box, [Fraction(cut - begin, end - begin) for cut in cuts]), strict=True):
            if volume(part):
                yield Message(holders[int((a + b) / 2 / share)], rank, part)
        begin = end


def _cut(box: Box, at: Sequence[Fraction]) -> list[Box]:
    """A box in parts that begin at these fractions of it, along its longest dim."""
    if len(at) == 1:
        return [box]
    dim = max(range(len(box)), key=lambda d: count(box[d]))
    size = count(box[dim])
    ends = [round(size * part) for part in (*at, Fraction(1))]
    return [(*box[:dim], _positions(box[dim], a, b), *box[dim + 1 :]) for a, b in itertools.pairwise(ends)]


def _positions(runs: Runs, first: int, last: int) -> Runs:
    """The indices from position ``first`` up to ``last``; the inverse of ``within``."""
    found, before = [], 0
    for a, b in runs:
        start, stop = max(a, a + first - before), min(b, a + last - before)
        if start < stop:
            found.append((start, stop))
        before += b - a
    return tuple(found)


def _point(mesh: Mesh, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
    at = mesh.coordinates(rank)
    return tuple(at[axis] for axis in axes)


def axes_between(sent: Sequence[Message], mesh: Mesh) -> tuple[str, ...]:
    """The axes of one mesh along which messages travel, in mesh order."""
    points = {rank: mesh.coordinates(rank) for rank in mesh.ranks}
    return tuple(
        axis for axis in mesh.names if any(points[one.sender][axis] != points[one.receiver][axis] for one in sent)
    )
