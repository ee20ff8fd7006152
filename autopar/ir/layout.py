"""How a value lies on a mesh: distributed attributes, layouts, and the arithmetic of pieces.

A dim is a sequence of *parts*, major first. A plain dim has one part; a merged dim (a flattened batch × sequence,
a fused qkv weight) has several, and each is split by itself: ``(4/dp 128/tp)``. Pieces follow ``torch.chunk``, axis
by axis, major first: with uneven sizes the first pieces are the larger ones and the last may be empty.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

from autopar.ir.mesh import Mesh

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
    def split(*dims: str | Sequence[str] | None, pending: Mapping[str, str] | Iterable[str] = ()) -> DistAttr:
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

        Parts of size one without axes go, neighbours that lie like one dim are merged, axes of size one go. What
        holds nothing is left as written: splits of dims without elements, and where among the parts a split size one stands.

        Raises:
            ValueError: a part of a merged dim has a negative size.
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


@lru_cache(maxsize=65536)
def largest(attr: DistAttr, shape: tuple[int, ...], mesh: Mesh) -> int:
    """Elements of the first piece, than which none is larger."""
    return math.prod(attr.local_shape(shape, mesh, dict.fromkeys(mesh.sizes, 0)))


@cache
def _replicated(ndim: int) -> DistAttr:
    return DistAttr((WHOLE,) * ndim)


@dataclass(frozen=True)
class Layout:
    """Where a value is and how it lies there: a mesh (or one of its stages) and a distributed attribute."""

    mesh: Mesh
    attr: DistAttr

    def __hash__(self) -> int:
        return hash((self.mesh._hash, self.attr._hash))


@lru_cache(maxsize=65536)
def layout_of(mesh: Mesh, attr: DistAttr) -> Layout:
    """The same object for the same Layout: a program has few, and its passes compare many."""
    return Layout(mesh, attr)


def chunk(size: int, count: int, index: int) -> tuple[int, int]:
    """(start, size) of piece ``index`` of ``torch.chunk`` into ``count``; trailing pieces may be empty."""
    step = -(-size // count)
    start = min(index * step, size)
    return start, min(step, size - start)


def chunk_lengths(size: int, count: int) -> list[int]:
    """The lengths of all pieces of ``torch.chunk`` into ``count``."""
    step = max(-(-size // count), 1)
    full, rest = divmod(size, step)
    return [*[step] * full, *[rest] * (full < count), *[0] * (count - full - 1)]


def span(size: int, axes: Axes, mesh: Mesh, at: Mapping[str, int]) -> tuple[int, int]:
    """(start, size) of the piece at ``at`` of a part split over ``axes``, major first."""
    start = 0
    for axis in axes:
        offset, size = chunk(size, mesh.sizes[axis], at[axis])
        start += offset
    return start, size


@lru_cache(maxsize=65536)
def _normalize(attr: DistAttr, shape: tuple[int, ...], mesh: Mesh) -> DistAttr:
    if negative := [(d, size) for d, dim in enumerate(attr.dims) for size, _ in dim if size is not None and size < 0]:
        raise ValueError(f"dim {negative[0][0]} has a part of size {negative[0][1]}; sizes of parts are at least 0, and multiply to the dim's {shape[negative[0][0]]}")
    dims = tuple(normal_dim(dim, size, mesh) for dim, size in zip(attr.dims, shape, strict=True))
    pending = tuple(sorted((axis, kind) for axis, kind in attr.pending if mesh.sizes.get(axis) != 1))
    return attr if dims == attr.dims and pending == attr.pending else DistAttr(dims, pending)


@lru_cache(maxsize=65536)
def normal_dim(dim: Dim, dim_size: int, mesh: Mesh) -> Dim:
    """The normal form of one dim: taken apart as far as it goes, then merged, major first, as far as it goes."""
    parts = [(dim_size if size is None else size, tuple([axis for axis in axes if mesh.sizes.get(axis) != 1])) for size, axes in dim]
    used = [axis for _, axes in parts for axis in axes]
    if not used:
        return WHOLE
    if len(parts) > 1 and dim_size and mesh.sizes.keys() >= set(used):
        merged: list[tuple[int, Axes]] = []
        for part in _finest(tuple(parts), mesh):
            one = merge(merged[-1], part, mesh) if merged else None
            merged[-1:] = [one] if one else [*merged[-1:], part]
        parts = merged
    return ((None, parts[0][1]),) if len(parts) == 1 else tuple(parts)


def held_sizes(size: int, axes: Axes, mesh: Mesh) -> set[int]:
    """The sizes of the pieces of a part, empty ones left out."""
    sizes = {size} - {0}
    for axis in axes:
        count, cut = mesh.sizes[axis], set()
        for n in sizes:
            step = -(-n // count)
            cut.add(step)
            if n % step:  # the last piece that is not empty
                cut.add(n % step)
        sizes = cut
    return sizes


def finest(parts: Sequence[tuple[int, Axes]], mesh: Mesh) -> list[tuple[int, Axes]]:
    """The smallest parts that lie as these do: ``(512/dp/tp)`` is ``2/dp 4/tp 64`` on dp=2 tp=4.

    Attributes with the same finest parts lie alike, and the reverse, but for parts of size one that are split (such
    axes only empty the ranks behind the first; they stay where they are written) and dims without elements.
    """
    return list(_finest(tuple(parts), mesh))


@lru_cache(maxsize=65536)
def _finest(parts: tuple[tuple[int, Axes], ...], mesh: Mesh) -> tuple[tuple[int, Axes], ...]:
    fine: list[tuple[int, Axes]] = []
    for size, axes in parts:
        rest = tuple([axis for axis in axes if mesh.sizes[axis] > 1])
        while rest and size > 1:
            for end in range(1, len(rest) + 1):
                taken, held = rest[:end], held_sizes(size, rest[:end], mesh)
                if len(held) == 1:
                    break
            unit = math.gcd(*held)
            fine.append((size // unit, taken))
            size, rest = unit, rest[len(taken) :]
        if size == 1 and rest and fine and fine[-1][0] == 1:
            fine[-1] = (1, fine[-1][1] + rest)
        elif size > 1 and fine and not fine[-1][1]:
            fine[-1] = (fine[-1][0] * size, ())
        elif size != 1 or rest:
            fine.append((size, rest))
    return tuple(fine)


def merge(left: tuple[int, Axes], right: tuple[int, Axes], mesh: Mesh) -> tuple[int, Axes] | None:
    """The one part that lies as two neighbours do, or ``None``."""
    (a, axes), (b, more) = left, right
    if more and max(held_sizes(a, axes, mesh), default=1) > 1:
        return None
    for end, axis in enumerate(axes):  # every piece of the merged part is a multiple of b, the right part stays together
        count = mesh.sizes[axis]
        if a % mesh.count(axes[: end + 1]) and any(-(-n * b // count) != -(-n // count) * b for n in held_sizes(a, axes[:end], mesh)):
            return None
    return a * b, axes + more


def regroup(parts: Sequence[tuple[int, Axes]], sizes: Sequence[int], mesh: Mesh) -> list[list[tuple[int, Axes]]] | None:
    """The parts of a dim, grouped by what makes up each of ``sizes``; ``None`` where a piece would be cut through.

    ``[512/dp]`` by ``[4, 128]`` is ``[4/dp], [128]`` when dp divides 4; ``[5/dp, 12]`` by ``[15, 4]`` is
    ``[5/dp, 3], [4]``.
    """
    if [size for size, _ in parts] == list(sizes):
        return [[part] for part in parts]
    total = math.prod(sizes)
    if total != math.prod(size for size, _ in parts):
        return None
    if total == 0:  # nothing is held anywhere: any place will do
        axes = tuple(axis for _, part_axes in parts for axis in part_axes)
        first = list(sizes).index(0)
        return [[(size, axes if k == first else ())] for k, size in enumerate(sizes)]
    rest = finest(parts, mesh)[::-1]
    groups: list[list[tuple[int, Axes]]] = []
    for size, after in zip(sizes, [*sizes[1:], 0], strict=True):
        group: list[tuple[int, Axes]] = []
        left = size
        while left > 1:
            n, axes = rest.pop()
            if left % n == 0:
                group.append((n, axes))
                left //= n
            elif n % left == 0 and not axes:
                group.append((left, ()))
                rest.append((n // left, ()))
                left = 1
            else:
                return None
        if rest and rest[-1][0] == 1 and (size == 1 or after != 1):
            group.append(rest.pop())
        groups.append(group)
    return None if rest else groups


def align(parts: Sequence[tuple[int, Axes]], sizes: Sequence[int], mesh: Mesh) -> list[Axes] | None:
    """The axes of each part when a dim is seen as parts of ``sizes``; ``None`` where it cannot be seen so.

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
    """A dim's parts; one that stands for all of it has the dim's size."""
    return [(size if part is None else part, axes) for part, axes in dim]


@lru_cache(maxsize=65536)
def in_common(dim: Dim, other: Dim, size: int, mesh: Mesh) -> tuple[tuple[int, Axes, Axes], ...] | None:
    """The finest parts of which both are made: their sizes, and their axes in each; ``None`` where there are none.

    ``(2/dp 6)`` and ``(4/tp 3)`` are both made of ``2 2 3`` when tp=2: ``(2, dp, tp), (2, (), ()), (3, (), ())``.
    """
    own, wanted = sized(dim, size), sized(other, size)
    ends = {end for parts in (own, wanted) for end in itertools.accumulate([n for n, _ in _finest(tuple(parts), mesh)], operator.mul)}
    steps = [divmod(b, a) for a, b in itertools.pairwise((1, *sorted(ends - {0, 1})))]
    if not steps or any(rest for _, rest in steps):
        return None
    sizes = [n for n, _ in steps]
    here, there = align(own, sizes, mesh), align(wanted, sizes, mesh)
    return None if here is None or there is None else tuple(zip(sizes, here, there, strict=True))
