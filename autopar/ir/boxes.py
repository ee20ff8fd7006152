"""Boxes: which elements of a value each rank holds, and how many it lacks of another Layout.

A piece is a product of index sets, one for each dim; each set is a few *runs* of indices, ``(start, stop)``: one for a
plain dim, more where a part behind the first of a merged dim is split. What a rank lacks is the difference of two such
products, so bytes are counted dim by dim, for all ranks at once. Both Layouts may lie on one mesh or on two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from autopar.ir.layout import Axes, Dim, Layout, chunk_lengths, in_common, sized, span
from autopar.ir.mesh import Mesh

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


def overlap(one: Runs, other: Runs) -> Runs:
    """The indices in both."""
    return _few(one, other) if len(one) + len(other) <= FEW else _many(one, other)


FEW = 64  # runs, which Python looks at as fast as NumPy


def _many(one: Runs, other: Runs) -> Runs:
    a, b = np.asarray(one, dtype=np.int64).reshape(-1, 2), np.asarray(other, dtype=np.int64).reshape(-1, 2)
    first = np.searchsorted(b[:, 1], a[:, 0], side="right")  # of each run of one, those of the other that it meets
    met = np.maximum(np.searchsorted(b[:, 0], a[:, 1]) - first, 0)
    i = np.repeat(np.arange(len(a)), met)
    j = np.arange(len(i)) - np.repeat(np.cumsum(met) - met, met) + first[i]
    return tuple(zip(np.maximum(a[i, 0], b[j, 0]).tolist(), np.minimum(a[i, 1], b[j, 1]).tolist(), strict=True))


@lru_cache(maxsize=65536)
def _few(one: Runs, other: Runs) -> Runs:
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
    return lacked_between(source.attr.dims, target.attr.dims, shape, source.mesh)


def lacked_between(source: Sequence[Dim], target: Sequence[Dim], shape: Sequence[int], mesh: Mesh) -> int:
    """``most_lacked`` of dims on one mesh."""
    needed: np.ndarray | int = 1
    held: np.ndarray | int = 1
    for n, have, want in zip(shape, source, target, strict=True):
        more, both = _sizes(have, want, n, mesh)
        needed, held = needed * more, held * both
    lacked = needed - held
    return lacked if isinstance(lacked, int) else int(lacked.max())


@lru_cache(maxsize=65536)
def _sizes(have: Dim, want: Dim, size: int, mesh: Mesh) -> tuple[np.ndarray | int, np.ndarray | int]:
    """Of one dim, for every point of the mesh: how many indices the target has, and how many both have."""
    seen = ((size, have[0][1], want[0][1]),) if len(have) == len(want) == 1 else in_common(have, want, size, mesh)
    if seen is None:
        return _counted(have, want, size, mesh)
    needed: np.ndarray | int = 1
    held: np.ndarray | int = 1
    for n, own, wanted in seen:
        if (alike := _alike(n, own, wanted, mesh)) is not None:
            needed, held = needed * alike[0], held * alike[1]
        else:
            (a, p), (b, q) = _spans(n, own, mesh), _spans(n, wanted, mesh)
            needed, held = needed * q, held * np.maximum(np.minimum(a + p, b + q) - np.maximum(a, b), 0)
    return needed, held


def _alike(size: int, own: Axes, wanted: Axes, mesh: Mesh) -> tuple[int, int] | None:
    """Of one part, how many indices every rank needs and how many of these it has, where all ranks need and have as many."""
    longer = own if len(own) > len(wanted) else wanted
    shorter = wanted if longer is own else own
    if longer[: len(shorter)] != shorter or size % mesh.count(longer):
        return None
    return size // mesh.count(wanted), size // mesh.count(longer)


INDICES = 1 << 16  # that are looked at all together


def _counted(have: Dim, want: Dim, size: int, mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
    """``_sizes`` of dims that are made of no common parts: how many indices two pieces share, for all pairs of pieces."""
    (held, unit), (wanted, other) = _pieces(have, size, mesh), _pieces(want, size, mesh)
    step = math.gcd(unit, other)
    if not step or size // step > INDICES:
        return _counted_by_point(have, want, size, mesh)
    count, own, there = math.prod(map(len, wanted)), _holders(held, unit // step), _holders(wanted, other // step)
    shared = np.bincount(own * count + there, minlength=math.prod(map(len, held)) * count).reshape(-1, count) * step
    here, at = _numbers(have, mesh), _numbers(want, mesh)
    return shared.sum(0)[at], shared[here, at]


def _pieces(dim: Dim, size: int, mesh: Mesh) -> tuple[list[list[int]], int]:
    """The lengths of the pieces of each part, and how many indices after each other always lie in one piece; lengths of the last part in these."""
    parts = sized(dim, size)
    unit = 1
    while parts and not parts[-1][1]:
        unit *= parts.pop()[0]
    lengths = [[n] for n, _ in parts]
    for k, (_, axes) in enumerate(parts):
        for axis in axes:
            lengths[k] = [length for n in lengths[k] for length in chunk_lengths(n, mesh.sizes[axis])]
    if lengths:
        shared = math.gcd(*lengths[-1])
        unit, lengths[-1] = unit * shared, [n // max(shared, 1) for n in lengths[-1]]
    return lengths, unit


def _holders(lengths: list[list[int]], repeat: int) -> np.ndarray:
    """The number of the piece that holds each index, pieces in order, major first."""
    holders = np.zeros(1, dtype=np.int64)
    for each in lengths:
        holders = (holders[:, None] * len(each) + np.repeat(np.arange(len(each)), each)).reshape(-1)
    return np.repeat(holders, repeat)


def _numbers(dim: Dim, mesh: Mesh) -> np.ndarray:
    """The number of the piece that each point of the mesh holds, with one dimension for each axis of the mesh."""
    numbers = np.zeros((1,) * len(mesh.axes), dtype=np.int64)
    for axis in (axis for _, axes in dim for axis in axes):
        p = mesh.sizes[axis]
        numbers = numbers * p + np.arange(p).reshape([p if name == axis else 1 for name in mesh.names])
    return numbers


def _counted_by_point(have: Dim, want: Dim, size: int, mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
    """The same for long dims, from the runs of the pieces."""
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
