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
    dims = tuple(_normalize_dim(dim, size, mesh) for dim, size in zip(attr.dims, shape, strict=True))
    pending = tuple(sorted((axis, kind) for axis, kind in attr.pending if mesh.sizes.get(axis) != 1))
    return attr if dims == attr.dims and pending == attr.pending else DistAttr(dims, pending)


def _normalize_dim(dim: Dim, dim_size: int, mesh: Mesh) -> Dim:
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


def align(parts: Sequence[tuple[int, Axes]], sizes: Sequence[int], mesh: Mesh) -> list[Axes] | None:
    """The axes of each part when a dim is seen as parts of ``sizes``; ``None`` where it cannot be seen so.

    ``align([(512, ("dp",))], [4, 128])`` is ``[("dp",), ()]`` when dp divides 4. Linear in the parts.
    """
    if [size for size, _ in parts] == list(sizes):
        return [axes for _, axes in parts]
    if math.prod(size for size, _ in parts) != math.prod(sizes):
        return None
    out: list[Axes] = []
    i = j = 0
    while i < len(parts) and j < len(sizes):  # one span of equal products at a time
        i0, j0 = i, j
        a, b = parts[i][0], sizes[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b and i < len(parts):
                a, i = a * parts[i][0], i + 1
            elif a > b and j < len(sizes):
                b, j = b * sizes[j], j + 1
            else:
                return None
        axes = _regroup(parts[i0:i], sizes[j0:j], mesh)
        if axes is None:
            return None
        out += axes
    if any(size != 1 or axes for size, axes in parts[i:]) or any(size != 1 for size in sizes[j:]):
        return None
    return out + [()] * (len(sizes) - j)


def _regroup(parts: Sequence[tuple[int, Axes]], sizes: Sequence[int], mesh: Mesh) -> list[Axes] | None:
    flat: tuple[int, Axes] = (1, ())
    for part in parts:
        if part[0] == 1 and not part[1]:
            continue
        merged = part if flat == (1, ()) else merge(flat, part, mesh)
        if merged is None:
            return None
        flat = merged
    rest = list(flat[1])
    if not rest:
        return [()] * len(sizes)
    wide = [k for k, size in enumerate(sizes) if size != 1]
    if len(wide) <= 1:  # only one place to put them, even or not
        return [tuple(rest) if k == (wide or [0])[0] else () for k in range(len(sizes))]
    out: list[Axes] = []
    for size in sizes:
        taken: list[str] = []
        while rest and size > 1 and size % mesh.sizes[rest[0]] == 0:
            size //= mesh.sizes[rest[0]]
            taken.append(rest.pop(0))
        if rest and size > 1:
            return None
        out.append(tuple(taken))
    return None if rest else out
