"""Count which elements of a value each rank holds, and how many it lacks of another Layout.

A box is a product of index sets, one set per dim. Each set is a few *runs* of indices, ``(start, stop)``. A plain dim
has one run; a merged dim has more where one of its later parts is split. The elements that a rank lacks are the
difference of two such products, so they are counted dim by dim, for all ranks at once. The two Layouts may be on one
mesh or on two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np

from autopar.ir.layout import Axes, Dim, Layout, chunk_lengths, in_common, sized, span
from autopar.ir.mesh import Mesh
from autopar.ir.subaxes import index_along, whole_axis

Runs = tuple[tuple[int, int], ...]  # sorted, disjoint, not empty: (start, stop)


# -- index sets ---------------------------------------------------------------------------------------------------


def runs_of(dim: Dim, size: int, mesh: Mesh, at: Mapping[str, int]) -> Runs:
    """Return the indices of a dim that the rank at ``at`` holds, in the order in which its piece stores them."""
    return _runs(tuple((size if n is None else n, *span(size if n is None else n, axes, mesh, at)) for n, axes in dim))


@lru_cache(maxsize=65536)
def _runs(parts: tuple[tuple[int, int, int], ...]) -> Runs:
    """Return the runs of a dim whose parts are ``(size, start, length)``, major first."""
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


def overlap(left: Runs, right: Runs) -> Runs:
    """Return the indices in both."""
    return _few(left, right) if len(left) + len(right) <= FEW else _many(left, right)


FEW = 64  # up to so many runs a Python loop is as fast as NumPy


def _many(left: Runs, right: Runs) -> Runs:
    a, b = np.asarray(left, dtype=np.int64).reshape(-1, 2), np.asarray(right, dtype=np.int64).reshape(-1, 2)
    first = np.searchsorted(b[:, 1], a[:, 0], side="right")  # for each run of a, the first run of b that it meets
    met = np.maximum(np.searchsorted(b[:, 0], a[:, 1]) - first, 0)
    i = np.repeat(np.arange(len(a)), met)
    j = np.arange(len(i)) - np.repeat(np.cumsum(met) - met, met) + first[i]
    return tuple(zip(np.maximum(a[i, 0], b[j, 0]).tolist(), np.minimum(a[i, 1], b[j, 1]).tolist(), strict=True))


@lru_cache(maxsize=65536)
def _few(left: Runs, right: Runs) -> Runs:
    shared, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        a, b = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if a < b:
            shared.append((a, b))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(shared)


def within(part: Runs, whole: Runs) -> Runs:
    """Return the positions, as runs, of the indices ``part`` within ``whole``, which contains all of them."""
    positions: list[tuple[int, int]] = []
    before, runs = 0, iter(whole)
    a, b = next(runs, (0, 0))
    for start, stop in part:
        while stop > b:
            before += b - a
            a, b = next(runs)
        first, last = before + start - a, before + stop - a
        positions[-1:] = (
            [(positions[-1][0], last)] if positions and positions[-1][1] == first else [*positions[-1:], (first, last)]
        )
    return tuple(positions)


Box = tuple[Runs, ...]  # one set of indices for each dim


def box_of(layout: Layout, shape: Sequence[int], rank: int) -> Box:
    """Return the box that ``rank`` holds; the rank is on the Layout's mesh."""
    at = layout.mesh.coordinates(rank)
    return tuple(runs_of(dim, n, layout.mesh, at) for n, dim in zip(shape, layout.attr.dims, strict=True))


def slices_of(box: Box) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield where the blocks of runs of a box lie: in the whole tensor, and in a piece that has just the box."""
    dims = []
    for runs in box:
        ends = itertools.accumulate(stop - start for start, stop in runs)
        dims.append([(slice(*run), slice(end - (run[1] - run[0]), end)) for run, end in zip(runs, ends, strict=True)])
    for block in itertools.product(*dims):
        yield tuple(in_whole for in_whole, _ in block), tuple(in_piece for _, in_piece in block)


def volume(box: Box) -> int:
    return math.prod(count(runs) for runs in box)


# -- counting -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=65536)
def most_lacked(source: Layout, target: Layout, shape: tuple[int, ...]) -> int:
    """Return the elements that the worst rank needs and does not hold. No transfers can bring it fewer.

    Both Layouts have the same pending axes. On one mesh these are not looked at, because all coordinates along them are
    alike.
    """
    if source.mesh != target.mesh:
        return max(
            volume(need)
            - (0 if have is None else math.prod(count(overlap(a, b)) for a, b in zip(have, need, strict=True)))
            for rank in target.mesh.ranks
            for need in (box_of(target, shape, rank),)
            for have in (box_of(source, shape, rank) if rank in source.mesh.ranks else None,)
        )
    return lacked_between(source.attr.dims, target.attr.dims, shape, source.mesh)


def lacked_between(source: Sequence[Dim], target: Sequence[Dim], shape: Sequence[int], mesh: Mesh) -> int:
    """Return ``most_lacked`` for dims on one mesh."""
    needed: np.ndarray | int = 1
    both_hold: np.ndarray | int = 1
    for n, have, want in zip(shape, source, target, strict=True):
        more, shared = _sizes_of_dim(have, want, n, mesh)
        needed, both_hold = needed * more, both_hold * shared
    lacked = needed - both_hold
    return lacked if isinstance(lacked, int) else int(lacked.max())


@lru_cache(maxsize=65536)
def _sizes_of_dim(have: Dim, want: Dim, size: int, mesh: Mesh) -> tuple[np.ndarray | int, np.ndarray | int]:
    """Return for one dim how many indices the target has, and how many of these the source has too.

    These are two arrays, with an entry for each point of the mesh.
    """
    common = ((size, have[0][1], want[0][1]),) if len(have) == len(want) == 1 else in_common(have, want, size, mesh)
    if common is None:
        return _counted(have, want, size, mesh)
    needed: np.ndarray | int = 1
    both_hold: np.ndarray | int = 1
    for n, have_axes, want_axes in common:
        if (alike := _same_on_all_ranks(n, have_axes, want_axes, mesh)) is not None:
            needed, both_hold = needed * alike[0], both_hold * alike[1]
        else:
            (a, p), (b, q) = spans(n, have_axes, mesh), spans(n, want_axes, mesh)
            needed, both_hold = needed * q, both_hold * np.maximum(np.minimum(a + p, b + q) - np.maximum(a, b), 0)
    return needed, both_hold


def _same_on_all_ranks(size: int, have: Axes, want: Axes, mesh: Mesh) -> tuple[int, int] | None:
    """Return how many indices of a part every rank needs, and how many of these it holds.

    ``None`` if that differs between ranks.
    """
    longer = have if len(have) > len(want) else want
    shorter = want if longer is have else have
    if longer[: len(shorter)] != shorter or size % mesh.count(longer):
        return None
    return size // mesh.count(want), size // mesh.count(longer)


INDICES = 1 << 16  # count dims with up to so many indices index by index


def _counted(have: Dim, want: Dim, size: int, mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
    """Compute ``_sizes_of_dim`` for dims that have no common parts.

    It counts the indices that two pieces share, for all pairs of pieces.
    """
    (have_lengths, have_unit), (want_lengths, want_unit) = _pieces(have, size, mesh), _pieces(want, size, mesh)
    step = math.gcd(have_unit, want_unit)
    if not step or size // step > INDICES:
        return _counted_by_point(have, want, size, mesh)
    count, have_holders, want_holders = (
        math.prod(map(len, want_lengths)),
        _holders(have_lengths, have_unit // step),
        _holders(want_lengths, want_unit // step),
    )
    shared = (
        np.bincount(have_holders * count + want_holders, minlength=math.prod(map(len, have_lengths)) * count).reshape(
            -1, count
        )
        * step
    )
    have_numbers, want_numbers = _piece_numbers(have, mesh), _piece_numbers(want, mesh)
    return shared.sum(0)[want_numbers], shared[have_numbers, want_numbers]


def _pieces(dim: Dim, size: int, mesh: Mesh) -> tuple[list[list[int]], int]:
    """Return the lengths of the pieces of each part, and a unit: so many consecutive indices are always in one piece.

    The lengths of the last part count units.
    """
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
    """Return the number of the piece that holds each index, with the pieces in order, major first."""
    holders = np.zeros(1, dtype=np.int64)
    for each in lengths:
        holders = (holders[:, None] * len(each) + np.repeat(np.arange(len(each)), each)).reshape(-1)
    return np.repeat(holders, repeat)


def _piece_numbers(dim: Dim, mesh: Mesh) -> np.ndarray:
    """Return the number of the piece that each point of the mesh holds.

    The array has one dimension for each axis of the mesh.
    """
    numbers = np.zeros((1,) * len(mesh.axes), dtype=np.int64)
    for axis in (axis for _, axes in dim for axis in axes):
        numbers = numbers * mesh.sizes[axis] + _indices(axis, mesh)
    return numbers


def _counted_by_point(have: Dim, want: Dim, size: int, mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
    """Do what ``_counted`` does, for long dims, from the runs of the pieces."""
    used = {whole_axis(axis) for dim in (have, want) for _, axes in dim for axis in axes}
    grid = [range(p) if axis in used else range(1) for axis, p in mesh.axes]
    pairs = []
    for point in itertools.product(*grid):
        at = dict(zip(mesh.names, point, strict=True))
        wanted = runs_of(want, size, mesh, at)
        pairs.append((count(wanted), count(overlap(runs_of(have, size, mesh, at), wanted))))
    counts = np.array(pairs, dtype=np.int64).reshape(*map(len, grid), 2)
    return counts[..., 0], counts[..., 1]


def _indices(axis: str, mesh: Mesh) -> np.ndarray:
    """Return the index along an axis or sub-axis for all coordinates, with one dimension for each axis of the mesh."""
    whole = whole_axis(axis)
    indices = [index_along(axis, {whole: k}) for k in range(mesh.sizes[whole])]
    return np.array(indices).reshape([-1 if name == whole else 1 for name in mesh.names])


@lru_cache(maxsize=4096)
def spans(size: int, axes: Axes, mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
    """Return ``layout.span`` for all coordinates: start and length, with one dimension for each axis of the mesh."""
    start, length = (
        np.zeros((1,) * len(mesh.axes), dtype=np.int64),
        np.full((1,) * len(mesh.axes), size, dtype=np.int64),
    )
    for axis in axes:
        p = mesh.sizes[axis]
        step = -(-length // p)
        offset = np.minimum(_indices(axis, mesh) * step, length)
        start, length = start + offset, np.minimum(step, length - offset)
    return start, length
