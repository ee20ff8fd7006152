"""Layouts: pieces follow torch.chunk, normal forms are equal exactly for equal holdings, dims are seen as parts."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import NAMES, attrs, factorizations, holdings, meshes, placements, shapes

from autopar.ir.layout import DistAttr, align, chunk, finest, regroup, span
from autopar.ir.mesh import Mesh

quick = settings(max_examples=100, deadline=None)


def chunks(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """``torch.chunk`` gives fewer pieces where it runs out; those that lack are empty."""
    pieces = list(torch.chunk(tensor, count))
    return pieces + [tensor[:0]] * (count - len(pieces))


@quick
@given(st.integers(0, 40), st.integers(1, 9))
def test_chunk_is_that_of_torch(size: int, count: int) -> None:
    spans = [chunk(size, count, index) for index in range(count)]
    whole = torch.arange(size)
    assert [whole[start : start + n].tolist() for start, n in spans] == [
        piece.tolist() for piece in chunks(whole, count)
    ]


@pytest.mark.simulated
@quick
@given(meshes(), st.integers(0, 40), st.data())
def test_span_is_chunk_axis_by_axis(mesh: Mesh, size: int, data: st.DataObject) -> None:
    axes = tuple(data.draw(st.lists(st.sampled_from(mesh.names), unique=True)))
    for at in mesh.points():
        piece = torch.arange(size)
        for axis in axes:
            piece = chunks(piece, mesh.sizes[axis])[at[axis]]
        start, n = span(size, axes, mesh, at)
        assert list(range(start, start + n)) == piece.tolist()


@pytest.mark.simulated
@quick
@given(st.data())
def test_local_shape_is_that_of_the_piece(data: st.DataObject) -> None:
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    attr = data.draw(attrs(mesh, shape))
    shapes_there = [attr.local_shape(shape, mesh, at) for at in mesh.points()]
    assert shapes_there == [there for there, _ in holdings(attr, shape, mesh)]
    for at, there in zip(mesh.points(), shapes_there, strict=True):
        assert math.prod(size for _, size in attr.local_parts(shape, mesh, at)) == math.prod(there)


def test_pieces_by_name() -> None:
    mesh = Mesh(dp=4)
    assert [span(5, ("dp",), mesh, at) for at in mesh.points()] == [(0, 2), (2, 2), (4, 1), (5, 0)]
    assert [chunk(0, 2, index) for index in range(2)] == [(0, 0), (0, 0)]
    mesh = Mesh(dp=2, tp=2)
    assert [span(6, ("tp", "dp"), mesh, at) for at in mesh.points()] == [(0, 2), (3, 2), (2, 1), (5, 1)]


# -- normal forms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dim", "size", "normal"),
    [
        (((4, ("dp",)), (128, ())), 512, ((None, ("dp",)),)),
        (((5, ("dp",)), (128, ())), 640, ((5, ("dp",)), (128, ()))),
        (((3, ()), (4096, ("tp",))), 3 * 4096, ((3, ()), (4096, ("tp",)))),
        (((2, ("dp",)), (128, ("tp",))), 256, ((None, ("dp", "tp")),)),
        (((1, ()), (8, ("dp",))), 8, ((None, ("dp",)),)),
        (((None, ("one", "dp", "other")),), 8, ((None, ("dp",)),)),
        (((8, ("one",)), (4, ())), 32, ((None, ()),)),
        (((6, ("tp",)), (2, ())), 12, ((3, ("tp",)), (4, ()))),  # pieces of 2 2 2 0, as of 3/tp
    ],
)
def test_normal_forms_by_name(dim, size: int, normal) -> None:
    mesh = Mesh(dp=2, tp=4, one=1, other=1)
    assert DistAttr((dim,)).normalize((size,), mesh) == DistAttr((normal,))


def test_pending_over_an_axis_of_one_is_nothing() -> None:
    attr = DistAttr.split(None, pending=["one", "dp"])
    assert attr.normalize((4,), Mesh(dp=2, one=1)) == DistAttr.split(None, pending=["dp"])


@pytest.mark.simulated
@quick
@given(st.data())
def test_normalisation_keeps_what_each_rank_holds(data: st.DataObject) -> None:
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    attr = data.draw(attrs(mesh, shape))
    normal = attr.normalize(shape, mesh)
    assert holdings(normal, shape, mesh) == holdings(attr, shape, mesh)
    assert normal.normalize(shape, mesh) == normal
    assert {a for a, _ in normal.pending} == {a for a, _ in attr.pending if mesh.sizes[a] > 1}


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_equal_normal_forms_hold_the_same_and_different_ones_do_not(data: st.DataObject) -> None:
    """But for what only empties: dims without elements, and splits of what is a single element already."""
    mesh, shape = data.draw(meshes()), data.draw(shapes(2, min_size=1))
    a, b = (data.draw(attrs(mesh, shape, pending=())) for _ in range(2))
    same = a.normalize(shape, mesh) == b.normalize(shape, mesh)
    if same or not (empties(a, shape, mesh) or empties(b, shape, mesh)):
        assert same == (holdings(a, shape, mesh) == holdings(b, shape, mesh))


def empties(attr: DistAttr, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Some axis leaves every rank behind its first with nothing."""
    pieces = list(zip(mesh.points(), holdings(attr, shape, mesh), strict=True))
    named = {axis for axis in attr.axes if mesh.sizes[axis] > 1}
    return any(all(at[axis] == 0 or not held for at, (_, held) in pieces) for axis in named)


def all_dims(size: int, mesh: Mesh) -> Iterator[tuple]:
    """Every dim of that size with up to three parts, split over any axes of the mesh in any order."""
    for count in range(len(mesh.names) + 1):
        for axes in itertools.permutations(mesh.names, count):
            for sizes in factorizations(size, 3):
                yield from (tuple(zip(sizes, placed, strict=True)) for placed in placements(axes, len(sizes)))


EXHAUSTIVE = [
    ((2, 2), 12),
    ((2, 3), 12),
    ((4, 2), 8),
    ((4, 2), 12),
    ((3, 4), 6),
    ((4, 3), 12),
    ((2, 2, 2), 8),
    ((2, 3, 2), 6),
]


@pytest.mark.parametrize(("sizes", "size"), EXHAUSTIVE)
def test_every_dim_has_one_normal_form(sizes: tuple[int, ...], size: int) -> None:
    mesh = Mesh(dict(zip(NAMES, sizes, strict=False)))
    forms: dict[str, set[DistAttr]] = defaultdict(set)
    for dim in all_dims(size, mesh):
        attr = DistAttr((dim,))
        normal = attr.normalize((size,), mesh)
        held = holdings(attr, (size,), mesh)
        assert holdings(normal, (size,), mesh) == held
        if not empties(attr, (size,), mesh):
            forms[repr(held)].add(normal)
    assert [many for many in forms.values() if len(many) > 1] == []


# -- a dim seen as parts -----------------------------------------------------------------------------------------


@pytest.mark.simulated
@pytest.mark.parametrize(("sizes", "size"), EXHAUSTIVE)
def test_align_finds_the_axes_wherever_there_are_any(sizes: tuple[int, ...], size: int) -> None:
    mesh = Mesh(dict(zip(NAMES, sizes, strict=False)))
    for dim in all_dims(size, mesh):
        held = holdings(DistAttr((dim,)), (size,), mesh)
        axes = tuple(axis for _, part in dim for axis in part)
        for wanted in factorizations(size, 3):
            found = align(dim, wanted, mesh)
            if found is not None:
                assert holdings(DistAttr((tuple(zip(wanted, found, strict=True)),)), (size,), mesh) == held
            else:
                others = [tuple(zip(wanted, placed, strict=True)) for placed in placements(axes, len(wanted))]
                assert all(holdings(DistAttr((other,)), (size,), mesh) != held for other in others), (dim, wanted)


@pytest.mark.simulated
@quick
@given(st.data())
def test_align_with_parts_of_one_and_zero(data: st.DataObject) -> None:
    mesh = data.draw(meshes(max_axes=2))
    size = data.draw(st.sampled_from([4, 6, 12, 8, 3, 1, 0]))
    shape = (size,)
    (dim,) = data.draw(attrs(mesh, shape, pending=())).dims
    parts = [(size if n is None else n, axes) for n, axes in dim]
    wanted = list(data.draw(st.sampled_from(list(factorizations(size, 2)))))
    for _ in range(data.draw(st.integers(0, 2))):
        wanted.insert(data.draw(st.integers(0, len(wanted))), 1)
    found = align(parts, wanted, mesh)
    held = holdings(DistAttr((dim,)), shape, mesh)
    axes = tuple(axis for _, part in parts for axis in part)
    if found is None and empties(DistAttr((dim,)), shape, mesh):
        return  # a split size one stays where it stands among the parts
    candidates = [found] if found is not None else list(placements(axes, len(wanted)))
    same = [holdings(DistAttr((tuple(zip(wanted, c, strict=True)),)), shape, mesh) == held for c in candidates]
    assert same == [found is not None] * len(candidates)


@pytest.mark.parametrize(
    ("parts", "sizes", "axes"),
    [
        ([(512, ("dp",))], [4, 128], [("dp",), ()]),
        ([(512, ("dp", "tp"))], [2, 256], [("dp",), ("tp",)]),
        ([(512, ("tp",))], [2, 256], None),  # 4 pieces of 2
        ([(5, ("dp",)), (128, ())], [640], None),
        ([(5, ("dp",)), (12, ())], [15, 4], None),
        ([(3, ()), (8, ("tp",))], [3, 2, 4], None),
        ([(3, ()), (8, ("tp",))], [3, 4, 2], [(), ("tp",), ()]),
        ([(12, ("tp",))], [6, 2], None),  # 3 3 3 3 is not 2 2 2 0, each twice
        ([(6, ("tp",))], [3, 2], [("tp",), ()]),  # 2 2 2 0 is 1 1 1 0, each twice
        ([(4, ())], [2, 3], None),
        ([(4, ())], [8], None),
        ([(4, ())], [2], None),
        ([(4, ("tp", "dp"))], [4, 1], [("tp",), ("dp",)]),  # one element a rank: dp splits the size one
        ([(4, ("tp", "dp"))], [1, 4], [(), ("tp", "dp")]),
        ([(1, ("dp",)), (4, ("tp",))], [1, 2, 2], None),
        ([(8, ())], [2, 1, 4], [(), (), ()]),
    ],
)
def test_align_by_name(parts, sizes: list[int], axes) -> None:
    assert align(parts, sizes, Mesh(dp=2, tp=4)) == axes


def test_groups_may_have_parts_of_their_own() -> None:
    mesh = Mesh(dp=2, tp=4)
    assert regroup([(5, ("dp",)), (12, ())], [15, 4], mesh) == [[(5, ("dp",)), (3, ())], [(4, ())]]
    assert regroup([(512, ("dp",))], [4, 128], mesh) == [[(2, ("dp",)), (2, ())], [(128, ())]]
    assert regroup([(512, ("tp",))], [2, 256], mesh) is None


def test_finest_parts() -> None:
    mesh = Mesh(dp=2, tp=4)
    assert finest([(512, ("dp", "tp"))], mesh) == [(2, ("dp",)), (4, ("tp",)), (64, ())]
    assert finest([(5, ("tp",)), (2, ()), (3, ())], mesh) == [(5, ("tp",)), (6, ())]
    assert finest([(2, ("dp", "tp"))], mesh) == [(2, ("dp",)), (1, ("tp",))]
