"""Describe how a value is sharded on a mesh (distributed attributes, layouts), and compute its pieces.

A dim is a sequence of *parts*, major first. A plain dim has one part; a merged dim (a flattened batch × sequence,
a fused qkv weight) has several, and each part is split by itself: ``(4/dp 128/tp)``. Pieces follow ``torch.chunk``,
axis by axis, major first: with uneven sizes the first pieces are the larger ones and the last may be empty.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

from autopar.ir.mesh import Mesh
from autopar.ir.sizes import Size, divides, gcd
from autopar.ir.subaxes import index_along, is_sub_axis, joined

Axes = tuple[str, ...]
# (size, axes that split it); ``None`` stands for the size of a plain dim, which the shape gives
Part = tuple[int | None, Axes]
Dim = tuple[Part, ...]

WHOLE: Dim = ((None, ()),)
UNDECIDED = "?"  # the axis of a dim that the user left open


@dataclass(frozen=True)
class DistAttr:
    """How one value is sharded and partially summed over the axes of its mesh.

    Attributes:
        dims: the parts of each dim, each with the axes that split it, major first.
        pending: (axis, kind) pairs, sorted: partial results that wait to be reduced; ``sum``, ``max``, ….
    """

    dims: tuple[Dim, ...]
    pending: tuple[tuple[str, str], ...] = ()
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.dims, self.pending)))

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    def replicated(ndim: int) -> DistAttr:
        """Return the attribute of a value of which every rank holds all."""
        return _replicated(ndim)

    @staticmethod
    def split(*dims: str | Sequence[str] | None, pending: Mapping[str, str] | Iterable[str] = ()) -> DistAttr:
        """Return an attribute from the axes that split each dim: ``split("dp", None, ("tp", "cp"))``."""
        kinds = pending if isinstance(pending, Mapping) else dict.fromkeys(pending, "sum")
        plain = tuple(() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in dims)
        return DistAttr(tuple(((None, axes),) for axes in plain), tuple(sorted(kinds.items())))

    @property
    def axes(self) -> list[str]:
        """All axes that split the value, then all pending ones; an axis named twice is listed twice."""
        return [a for dim in self.dims for _, axes in dim for a in axes] + [a for a, _ in self.pending]

    @property
    def is_replicated(self) -> bool:
        return not self.pending and all(not axes for dim in self.dims for _, axes in dim)

    def without_pending(self) -> DistAttr:
        return replace(self, pending=())

    def parts(self, shape: Sequence[int]) -> list[tuple[int, Axes]]:
        """Return all parts of all dims with their sizes, in order."""
        return [
            (n if size is None else size, axes) for n, dim in zip(shape, self.dims, strict=True) for size, axes in dim
        ]

    def normalize(self, shape: Sequence[int], mesh: Mesh) -> DistAttr:
        """Return the normal form, which equal attributes share.

        ``(4/dp 128)`` is ``512/dp`` when dp divides 4. Parts of size one without axes and axes of size one are dropped,
        and neighbouring parts that together are sharded like one are merged. Two things stay as written: the splits of
        dims without elements, and the position of a split part of size one.

        Raises:
            ValueError: a part of a merged dim has a negative size.
        """
        return _normalize(self, tuple(shape), mesh)

    def local_parts(self, shape: Sequence[int], mesh: Mesh, at: Mapping[str, int]) -> list[tuple[int, int]]:
        """Return (start, size) of the piece at coordinates ``at``, part by part."""
        return [span(size, axes, mesh, at) for size, axes in self.parts(shape)]

    def local_shape(self, shape: Sequence[int], mesh: Mesh, at: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the piece at coordinates ``at``."""
        return tuple(
            math.prod(span(n if size is None else size, axes, mesh, at)[1] for size, axes in dim)
            for n, dim in zip(shape, self.dims, strict=True)
        )


@lru_cache(maxsize=65536)
def largest(attr: DistAttr, shape: tuple[int, ...], mesh: Mesh) -> int:
    """Return the elements of the first piece, which is a largest one."""
    return math.prod(attr.local_shape(shape, mesh, dict.fromkeys(mesh.sizes, 0)))


@cache
def _replicated(ndim: int) -> DistAttr:
    return DistAttr((WHOLE,) * ndim)


@dataclass(frozen=True)
class Layout:
    """The place of a value, which is a mesh or one of its stages, and its distributed attribute there."""

    mesh: Mesh
    attr: DistAttr

    def __hash__(self) -> int:
        return hash((self.mesh._hash, self.attr._hash))


@lru_cache(maxsize=65536)
def layout_of(mesh: Mesh, attr: DistAttr) -> Layout:
    """Return a Layout, the same object for equal arguments: a program has few, and its passes compare many."""
    return Layout(mesh, attr)


def chunk(size: int, count: int, index: int) -> tuple[int, int]:
    """Return (start, size) of piece ``index`` of ``torch.chunk`` into ``count``; trailing pieces may be empty."""
    step = -(-size // count)
    start = min(index * step, size)
    return start, min(step, size - start)


def chunk_lengths(size: int, count: int) -> list[int]:
    """Return the lengths of all pieces of ``torch.chunk`` into ``count``."""
    step = max(-(-size // count), 1)
    full, rest = divmod(size, step)
    return [*[step] * full, *[rest] * (full < count), *[0] * (count - full - 1)]


def span(size: int, axes: Axes, mesh: Mesh, at: Mapping[str, int]) -> tuple[int, int]:
    """Return (start, size) of the piece at ``at`` of a part split over ``axes``, major first."""
    start = 0
    for axis in axes:
        offset, size = chunk(size, mesh.sizes[axis], at[axis] if axis in at else index_along(axis, at))
        start += offset
    return start, size


@lru_cache(maxsize=65536)
def _normalize(attr: DistAttr, shape: tuple[int, ...], mesh: Mesh) -> DistAttr:
    if negative := [(d, size) for d, dim in enumerate(attr.dims) for size, _ in dim if size is not None and size < 0]:
        raise ValueError(
            f"dim {negative[0][0]} has a part of size {negative[0][1]}; sizes of parts are at least 0, and multiply "
            f"to the dim's {shape[negative[0][0]]}"
        )
    dims = tuple(normal_dim(dim, size, mesh) for dim, size in zip(attr.dims, shape, strict=True))
    pending = tuple(sorted((axis, kind) for axis, kind in attr.pending if mesh.sizes.get(axis) != 1))
    return attr if dims == attr.dims and pending == attr.pending else DistAttr(dims, pending)


@lru_cache(maxsize=65536)
def normal_dim(dim: Dim, dim_size: int, mesh: Mesh) -> Dim:
    """Return the normal form of one dim.

    It is divided into its finest parts; then neighbours are merged, major first, while possible.
    """
    parts = [
        (dim_size if size is None else size, tuple([axis for axis in axes if mesh.sizes.get(axis) != 1]))
        for size, axes in dim
    ]
    used = [axis for _, axes in parts for axis in axes]
    if not used:
        return WHOLE
    if len(parts) > 1 and dim_size and all(axis in mesh.sizes for axis in used):
        merged: list[tuple[int, Axes]] = []
        for part in _finest(tuple(parts), mesh):
            joined = merge(merged[-1], part, mesh) if merged else None
            merged[-1:] = [joined] if joined else [*merged[-1:], part]
        parts = merged
    if any(map(is_sub_axis, used)):
        parts = [(size, _joined(size, axes, mesh)) for size, axes in parts]
    return ((None, parts[0][1]),) if len(parts) == 1 else tuple(parts)


def _joined(size: int, axes: Axes, mesh: Mesh) -> Axes:
    """Return ``joined`` axes of a part, if its pieces are the same: uneven pieces of sub-axes are others."""
    return joined(axes) if all(axis in mesh.sizes for axis in axes) and divides(mesh.count(axes), size) else axes


def piece_sizes(size: int, axes: Axes, mesh: Mesh) -> set[int]:
    """Return the different sizes of the pieces of a part, without the empty ones."""
    sizes = {size} - {0}
    for axis in axes:
        count, cut = mesh.sizes[axis], set()
        for n in sizes:
            step = -(-n // count)
            cut.add(step)
            if n % step:  # the last nonempty piece
                cut.add(n % step)
        sizes = cut
    return sizes


def finest(parts: Sequence[tuple[int, Axes]], mesh: Mesh) -> list[tuple[int, Axes]]:
    """Return the smallest parts that are sharded like ``parts``: ``(512/dp/tp)`` is ``2/dp 4/tp 64`` on dp=2 tp=4.

    Two attributes shard a value alike exactly if their finest parts are equal. There are two exceptions: split parts of
    size one stay where they are written (their axes only leave ranks other than the first empty), and so do dims
    without elements.
    """
    return list(_finest(tuple(parts), mesh))


@lru_cache(maxsize=65536)
def _finest(parts: tuple[tuple[int, Axes], ...], mesh: Mesh) -> tuple[tuple[int, Axes], ...]:
    fine: list[tuple[int, Axes]] = []
    for size, axes in parts:
        remaining = tuple([axis for axis in axes if mesh.sizes[axis] > 1])
        while remaining and size > 1:
            if isinstance(size, Size) and not divides(mesh.count(remaining), size):
                break  # at other values of its symbols the pieces may have unequal sizes
            for end in range(1, len(remaining) + 1):
                taken, sizes = remaining[:end], piece_sizes(size, remaining[:end], mesh)
                if len(sizes) == 1:
                    break
            unit = gcd(*sizes)
            fine.append((size // unit, taken))
            size, remaining = unit, remaining[len(taken) :]
        if size == 1 and remaining and fine and fine[-1][0] == 1:
            fine[-1] = (1, fine[-1][1] + remaining)
        elif size > 1 and not remaining and fine and not fine[-1][1]:
            fine[-1] = (fine[-1][0] * size, ())
        elif size != 1 or remaining:
            fine.append((size, remaining))
    return tuple(fine)


def merge(left: tuple[int, Axes], right: tuple[int, Axes], mesh: Mesh) -> tuple[int, Axes] | None:
    """Return the part that is sharded like two neighbouring ones together, or ``None``."""
    (a, axes), (b, more) = left, right
    if isinstance(a, Size) and (more or (axes and not divides(mesh.count(axes), a))):
        return None  # at other values of its symbols the pieces may have other lengths
    if more and max(piece_sizes(a, axes, mesh), default=1) > 1:
        return None
    # every piece of the merged part must be a multiple of b: the right part stays whole
    for end, axis in enumerate(axes):
        count = mesh.sizes[axis]
        if a % mesh.count(axes[: end + 1]) and any(
            -(-n * b // count) != -(-n // count) * b for n in piece_sizes(a, axes[:end], mesh)
        ):
            return None
    return a * b, axes + more


def regroup(parts: Sequence[tuple[int, Axes]], sizes: Sequence[int], mesh: Mesh) -> list[list[tuple[int, Axes]]] | None:
    """Group the parts of a dim by the ``sizes`` that they make up; ``None`` where a size would cut a piece.

    ``[512/dp]`` by ``[4, 128]`` is ``[4/dp], [128]`` when dp divides 4; ``[5/dp, 12]`` by ``[15, 4]`` is
    ``[5/dp, 3], [4]``.
    """
    if [size for size, _ in parts] == list(sizes):
        return [[part] for part in parts]
    total = math.prod(sizes)
    if total != math.prod(size for size, _ in parts):
        return None
    if total == 0:  # no rank holds anything: put all axes at the first size 0
        axes = tuple(axis for _, part_axes in parts for axis in part_axes)
        first = list(sizes).index(0)
        return [[(size, axes if k == first else ())] for k, size in enumerate(sizes)]
    remaining = finest(parts, mesh)[::-1]
    groups: list[list[tuple[int, Axes]]] = []
    for size, after in zip(sizes, [*sizes[1:], 0], strict=True):
        group: list[tuple[int, Axes]] = []
        left = size
        while left > 1:
            n, axes = remaining.pop()
            if divides(n, left):
                group.append((n, axes))
                left //= n
            elif divides(left, n) and not axes:
                group.append((left, ()))
                remaining.append((n // left, ()))
                left = 1
            else:
                return None
        if remaining and remaining[-1][0] == 1 and (size == 1 or after != 1):
            group.append(remaining.pop())
        groups.append(group)
    return None if remaining else groups


def align(parts: Sequence[tuple[int, Axes]], sizes: Sequence[int], mesh: Mesh) -> list[Axes] | None:
    """Return the axes of each part of a dim when it is seen as parts of ``sizes``; ``None`` where that is impossible.

    ``align([(512, ("dp",))], [4, 128])`` is ``[("dp",), ()]`` when dp divides 4.
    """
    if [part for part, _ in parts] == list(sizes):
        return [axes for _, axes in parts]
    groups = regroup(parts, sizes, mesh)
    if groups is None:
        return None
    out = [tuple([axis for _, axes in group for axis in axes]) for group in groups]
    for group, size, axes in zip(groups, sizes, out, strict=True):
        if group != [(size, axes)] and _finest(tuple(group), mesh) != _finest(((size, axes),), mesh):
            return None
    return out


def sized(dim: Dim, size: int) -> list[tuple[int, Axes]]:
    """Return a dim's parts with sizes; the part of a plain dim has the dim's size."""
    return [(size if part is None else part, axes) for part, axes in dim]


@lru_cache(maxsize=65536)
def in_common(dim: Dim, other: Dim, size: int, mesh: Mesh) -> tuple[tuple[int, Axes, Axes], ...] | None:
    """Return the finest parts that both dims consist of: size, axes in ``dim``, axes in ``other``.

    ``None`` if there are none. ``(2/dp 6)`` and ``(4/tp 3)`` both consist of ``2 2 3`` when tp=2: ``(2, dp, tp), (2,
    (), ()), (3, (), ())``.
    """
    have, want = sized(dim, size), sized(other, size)
    ends = {
        end
        for parts in (have, want)
        for end in itertools.accumulate([n for n, _ in _finest(tuple(parts), mesh)], operator.mul)
    }
    steps = [divmod(b, a) for a, b in itertools.pairwise((1, *sorted(ends - {0, 1})))]
    if not steps or any(rest for _, rest in steps):
        return None
    sizes = [n for n, _ in steps]
    have_axes, want_axes = align(have, sizes, mesh), align(want, sizes, mesh)
    return None if have_axes is None or want_axes is None else tuple(zip(sizes, have_axes, want_axes, strict=True))
