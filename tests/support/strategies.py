"""Random meshes, shapes and Layouts for property tests, and what every rank holds as the oracle of their meaning."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from hypothesis import strategies as st

from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.runtime.simulation.pieces import cut

NAMES = ("dp", "tp", "cp")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)
UNREDUCED = (torch.float8_e4m3fn, torch.float8_e5m2)  # small whole numbers are not exact in these


def ascending(draw: st.DrawFn, sizes: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """The ranks in some order on a grid of these sizes in which they ascend along each axis."""
    grid = list(itertools.product(*map(range, sizes)))
    placed: dict[tuple[int, ...], int] = {}
    for rank in sorted(ranks):
        before = ([(*point[:k], n - 1, *point[k + 1 :]) for k, n in enumerate(point) if n] for point in grid)
        free = [
            point
            for point, others in zip(grid, before, strict=True)
            if point not in placed and all(other in placed for other in others)
        ]
        placed[draw(st.sampled_from(free))] = rank
    return [placed[point] for point in grid]


@st.composite
def meshes(
    draw: st.DrawFn, *, max_axes: int = 3, max_size: int = 4, max_ranks: int = 16, permuted: bool = False
) -> Mesh:
    sizes = draw(
        st.lists(st.integers(1, max_size), min_size=1, max_size=max_axes).filter(lambda s: math.prod(s) <= max_ranks)
    )
    names = draw(st.permutations(NAMES))
    ranks = ascending(draw, sizes, range(math.prod(sizes))) if permuted and draw(st.booleans()) else None
    return Mesh(dict(zip(names, sizes, strict=False)), ranks=ranks)


def kinds(dtype: torch.dtype) -> tuple[str, ...]:
    """Every kind of reduction that a dtype has."""
    ordered = () if dtype.is_complex or dtype is torch.uint64 else ("max", "min")
    return ("sum", "prod", *ordered, *(("avg",) if dtype.is_floating_point or dtype.is_complex else ()))


@st.composite
def worlds(draw: st.DrawFn, max_ranks: int = 6, *, permuted: bool = True) -> tuple[Mesh, Mesh]:
    """Two meshes of some of the ranks below ``max_ranks``: equal, of different shape, disjoint, overlapping, one in the
    other."""
    found = []
    for name in ("s0", "s1"):
        axes = draw(meshes(max_ranks=max_ranks, max_size=max_ranks)).axes
        ranks = draw(st.permutations(range(max_ranks)))[: math.prod(size for _, size in axes)]
        laid = ascending(draw, [size for _, size in axes], ranks) if permuted and draw(st.booleans()) else sorted(ranks)
        found.append(Mesh(dict(axes), ranks=laid, name=name))
    if draw(st.integers(0, 4)) == 0:
        found[1] = Mesh(dict(found[0].axes), ranks=found[0].ranks, name="s1")
    return found[0], found[1]


def shapes(max_dims: int = 3, *, min_size: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    """Sizes with many divisors, primes, one and zero."""
    sizes = [n for n in (4, 6, 12, 1, 2, 3, 5, 7, 8, 0) if n >= min_size]
    return st.lists(st.sampled_from(sizes), max_size=max_dims).map(tuple)


@st.composite
def part_lists(draw: st.DrawFn, size: int, max_parts: int = 3) -> tuple[int, ...]:
    """Sizes of parts whose product is ``size``."""
    parts, rest = [], size
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2])) if max_parts > 1 else 0):
        part = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0] if rest else [1, 2, 3]))
        parts.append(part)
        rest //= part
    return (*parts, rest)


@st.composite
def attrs(
    draw: st.DrawFn, mesh: Mesh, shape: Sequence[int], *, pending: Sequence[str] = ("sum",), max_parts: int = 3
) -> DistAttr:
    """Each axis splits some part of some dim, in any order, or is pending, or is not named; one kind of pending a
    value."""
    parts = [draw(part_lists(size, max_parts)) for size in shape]
    axes: list[list[list[str]]] = [[[] for _ in sizes] for sizes in parts]
    kinds: dict[str, str] = {}
    places = [(d, k) for d, sizes in enumerate(parts) for k in range(len(sizes))]
    choices: list[object] = [None, *places, *places, *([draw(st.sampled_from(pending))] if pending else [])]
    for axis in draw(st.permutations(mesh.names)):
        match draw(st.sampled_from(choices)):
            case str(kind):
                kinds[axis] = kind
            case (d, k):
                axes[d][k].append(axis)
    dims = tuple(
        ((None, tuple(a[0])),) if len(sizes) == 1 else tuple(zip(sizes, map(tuple, a), strict=True))
        for sizes, a in zip(parts, axes, strict=True)
    )
    return DistAttr(dims, tuple(sorted(kinds.items())))


def factorizations(size: int, max_parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write ``size`` as an ordered product of parts above one."""
    yield (size,)
    if max_parts > 1:
        for part in range(2, size):
            if size % part == 0:
                yield from ((part, *rest) for rest in factorizations(size // part, max_parts - 1))


def placements(axes: Sequence[str], parts: int) -> Iterator[list[tuple[str, ...]]]:
    """Every way to put a sequence of axes, in that order, on ``parts`` parts."""
    for ends in itertools.combinations_with_replacement(range(len(axes) + 1), parts - 1):
        bounds = [0, *ends, len(axes)]
        yield [tuple(axes[a:b]) for a, b in itertools.pairwise(bounds)]


def holdings(attr: DistAttr, shape: Sequence[int], mesh: Mesh) -> list[tuple[tuple[int, ...], list[int]]]:
    """For each rank the shape of its piece and the numbers of the elements in it."""
    type = TensorType(tuple(shape), torch.int64, Layout(mesh, attr))
    whole = torch.arange(math.prod(shape)).reshape(list(shape))
    pieces = [cut(whole, type, at) for at in mesh.points()]
    return [(tuple(piece.shape), piece.flatten().tolist()) for piece in pieces]
