"""How a value lies on a mesh: distributed attributes, layouts, and the arithmetic of pieces.

A dim is a sequence of *parts*, major first. A plain dim has one part; a merged dim (a flattened batch × sequence,
a fused qkv weight) has several, and each is split by itself: ``(4/dp 128/tp)``. Pieces follow ``torch.chunk``, axis
by axis, major first: with uneven sizes the first pieces are the larger ones and the last may be empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from autopar.mesh import Mesh

Axes = tuple[str, ...]
Part = tuple[int | None, Axes]  # (size, axes that split it); the size of a plain dim is the tensor's and stays None
Dim = tuple[Part, ...]

WHOLE: Dim = ((None, ()),)
UNDECIDED = "?"  # the axis of a dim that the user left open


@dataclass(frozen=True)
class DistAttr:
    """How one value lies on its mesh.

    Attributes:
        dims: for each dim its parts, each with the axes that split it, major first.
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
        """Every rank holds the whole value."""
        return _replicated(ndim)

    @staticmethod
    def split(*dims: str | None | Sequence[str], pending: Mapping[str, str] | Iterable[str] = ()) -> DistAttr:
        """``split("dp", None, ("tp", "cp"))``: for each dim the axes that split it."""
        kinds = pending if isinstance(pending, Mapping) else dict.fromkeys(pending, "sum")
        plain = tuple(() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in dims)
        return DistAttr(tuple(((None, axes),) for axes in plain), tuple(sorted(kinds.items())))

    @property
    def axes(self) -> list[str]:
        """Every axis the value names, splits first; an axis named twice is listed twice."""
        return [a for dim in self.dims for _, axes in dim for a in axes] + [a for a, _ in self.pending]

    @property
    def is_replicated(self) -> bool:
        return not self.pending and all(not axes for dim in self.dims for _, axes in dim)

    def without_pending(self) -> DistAttr:
        return replace(self, pending=())

    def parts(self, shape: Sequence[int]) -> list[tuple[int, Axes]]:
        """All parts of all dims with their sizes, in order."""
        return [(n if size is None else size, axes) for n, dim in zip(shape, self.dims, strict=True) for size, axes in dim]

    def normalize(self, shape: Sequence[int], mesh: Mesh) -> DistAttr:
        """The one form that equal attributes share: ``(4/dp 128)`` is ``512/dp`` when dp divides 4.

        Parts of size one without axes go, neighbours that lie like one dim are merged, axes of size one go.
        """
        return _normalize(self, tuple(shape), mesh)

    def local_parts(self, shape: Sequence[int], mesh: Mesh, at: Mapping[str, int]) -> list[tuple[int, int]]:
        """(start, size) of the piece at coordinates ``at``, part by part."""
        return [span(size, axes, mesh, at) for size, axes in self.parts(shape)]

    def local_shape(self, shape: Sequence[int], mesh: Mesh, at: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the piece at coordinates ``at``."""
        return tuple(
            math.prod(span(n if size is None else size, axes, mesh, at)[1] for size, axes in dim)
            for n, dim in zip(shape, self.dims, strict=True)
        )


@lru_cache(maxsize=None)
def _replicated(ndim: int) -> DistAttr:
    return DistAttr((WHOLE,) * ndim)


@dataclass(frozen=True)
class Layout:
    """Where a value is and how it lies there: a mesh (or one of its stages) and a distributed attribute."""

    mesh: Mesh
    attr: DistAttr

    def __hash__(self) -> int:
        return hash((self.mesh._hash, self.attr._hash))


def chunk(size: int, count: int, index: int) -> tuple[int, int]:
    """(start, size) of piece ``index`` of ``torch.chunk`` into ``count``; trailing pieces may be empty."""
    step = -(-size // count)
    start = min(index * step, size)
    return start, min(step, size - start)


def span(size: int, axes: Axes, mesh: Mesh, at: Mapping[str, int]) -> tuple[int, int]:
    """(start, size) of the piece at ``at`` of a part split over ``axes``, major first."""
    start = 0
    for axis in axes:
        offset, size = chunk(size, mesh.sizes[axis], at[axis])
        start += offset
    return start, size


@lru_cache(maxsize=65536)
def _normalize(attr: DistAttr, shape: tuple[int, ...], mesh: Mesh) -> DistAttr:
    dims = tuple(normal_dim(dim, size, mesh) for dim, size in zip(attr.dims, shape, strict=True))
    pending = tuple(sorted((axis, kind) for axis, kind in attr.pending if mesh.sizes.get(axis) != 1))
    return attr if dims == attr.dims and pending == attr.pending else DistAttr(dims, pending)


def normal_dim(dim: Dim, dim_size: int, mesh: Mesh) -> Dim:
    """The normal form of one dim."""
    stack: list[tuple[int, Axes]] = []
    for part_size, part_axes in dim:
        size = dim_size if part_size is None else part_size
        axes = tuple(axis for axis in part_axes if mesh.sizes.get(axis) != 1)
        if size == 1 and not axes:
            continue
        merged = merge(stack[-1], (size, axes), mesh) if stack else None
        if merged is None:
            stack.append((size, axes))
        else:
            stack[-1] = merged
    if not stack:
        return WHOLE
    return ((None, stack[0][1]),) if len(stack) == 1 else tuple(stack)


def merge(left: tuple[int, Axes], right: tuple[int, Axes], mesh: Mesh) -> tuple[int, Axes] | None:
    """The one part that lies as two neighbours do, or ``None``."""
    (a, axes), (b, more) = left, right
    count = mesh.count(axes)
    if (not more and a % count == 0) or (more and a == count):
        return a * b, axes + more
    return None


def regroup(parts: Sequence[tuple[int, Axes]], sizes: Sequence[int], mesh: Mesh) -> list[list[tuple[int, Axes]]] | None:
    """The parts of a dim, grouped by what makes up each of ``sizes``; ``None`` where a piece would be cut through.

    ``[(512/dp)]`` by ``[4, 128]`` is ``[(4/dp)], [128]`` when dp divides 4; ``[(5/dp), 12]`` by ``[15, 4]`` is
    ``[(5/dp), 3], [4]``. Linear in the parts.
    """
    if [size for size, _ in parts] == list(sizes):
        return [[part] for part in parts]
    total = math.prod(sizes)
    if total != math.prod(size for size, _ in parts) or total == 0:
        return None
    rest = list(reversed(parts))
    groups: list[list[tuple[int, Axes]]] = []
    for left in sizes:
        group: list[tuple[int, Axes]] = []
        while rest and (left != 1 or rest[-1][0] == 1):
            size, axes = rest.pop()
            if left % size == 0:
                group.append((size, axes))
                left //= size
                continue
            halves = _cut((size, axes), left, mesh)
            if halves is None:
                return None
            group.append(halves[0])
            rest.append(halves[1])
            left = 1
        groups.append(group)
    return groups


def _cut(part: tuple[int, Axes], major: int, mesh: Mesh) -> tuple[tuple[int, Axes], tuple[int, Axes]] | None:
    """``(512/dp)`` as ``(4/dp)`` and ``128``: axes go to the major half as long as they divide it or use it up."""
    size, axes = part
    if size % major:
        return None
    for end in range(len(axes), -1, -1):
        count = mesh.count(axes[:end])
        if (end == len(axes) and major % count == 0) or count == major:
            return (major, axes[:end]), (size // major, axes[end:])
    return None


def align(parts: Sequence[tuple[int, Axes]], sizes: Sequence[int], mesh: Mesh) -> list[Axes] | None:
    """The axes of each part when a dim is seen as parts of ``sizes``; ``None`` where it cannot be seen so."""
    groups = regroup(parts, sizes, mesh)
    if groups is None:
        return None
    out: list[Axes] = []
    for group in groups:
        whole: tuple[int, Axes] | None = (1, ())
        for part in group:
            whole = merge(whole, part, mesh) if whole is not None else None
        if whole is None:
            return None
        out.append(whole[1])
    return out
