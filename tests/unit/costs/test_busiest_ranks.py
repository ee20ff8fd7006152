"""What the busiest rank of an exchange sends and receives: counted, against the list of all messages."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import attrs, meshes, shapes, worlds

from autopar.costs import exchanges
from autopar.costs.exchanges import busiest, counted_between, counted_on_mesh, listed, node_digits, part_pairs
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh

NODES = st.sampled_from([1, 2, 3, 4, 6, 8, 64])


@pytest.mark.simulated
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_count_is_that_of_the_messages_on_a_mesh(data: st.DataObject) -> None:
    mesh = data.draw(meshes(max_ranks=24, max_size=6, permuted=True))
    shape = data.draw(st.one_of(shapes(), st.sampled_from([(24,), (48, 24), (24, 12, 48)])))
    source, target = (data.draw(attrs(mesh, shape)) for _ in range(2))
    target = DistAttr(target.dims, source.pending)
    used = {axis for axis, _ in source.pending}
    target = DistAttr(
        tuple(tuple((n, tuple(a for a in axes if a not in used)) for n, axes in dim) for dim in target.dims),
        source.pending,
    )
    here, there = (Layout(mesh, attr.normalize(shape, mesh)) for attr in (source, target))
    per_node = data.draw(NODES)
    assert busiest(here, there, shape, per_node) == listed(here, there, shape, per_node)


@st.composite
def even_attrs(draw: st.DrawFn, mesh: Mesh, dims: int, free: tuple[str, ...]) -> DistAttr:
    axes: list[list[str]] = [[] for _ in range(dims)]
    for axis in draw(st.permutations(free)):
        place = draw(st.integers(-1, dims - 1))
        if place >= 0:
            axes[place].append(axis)
    return DistAttr.split(*axes)


EVEN = [Mesh(a=2, b=2), Mesh(a=4, b=2), Mesh(a=2, b=4), Mesh(a=8, b=2), Mesh(a=2, b=2, c=2), Mesh(a=4, b=2, c=4),
        Mesh(a=2, b=2, c=2, d=2), Mesh(a=3, b=3), Mesh(a=3, b=2, c=3),
        Mesh(a=4, b=4, ranks=range(4, 36, 2))]  # fmt: skip


@pytest.mark.simulated
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_count_of_even_pieces_is_that_of_the_messages(data: st.DataObject) -> None:
    mesh, dims = data.draw(st.sampled_from(EVEN)), data.draw(st.integers(1, 3))
    shape = (mesh.size * 2,) * dims
    pending = tuple(data.draw(st.sets(st.sampled_from(mesh.names), max_size=1)))
    free = tuple(axis for axis in mesh.names if axis not in pending)
    here, there = (
        Layout(mesh, DistAttr(data.draw(even_attrs(mesh, dims, free)).dims, tuple((axis, "sum") for axis in pending)))
        for _ in range(2)
    )
    per_node = data.draw(NODES)
    assert busiest(here, there, shape, per_node) == listed(here, there, shape, per_node)


@pytest.mark.simulated
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_count_is_that_of_the_messages_between_meshes(data: st.DataObject) -> None:
    """Large boxes are divided among their holders; here they are large from four elements on."""
    if data.draw(st.booleans()):
        first, second = (data.draw(st.sampled_from(EVEN)) for _ in range(2))
        start = first.ranks[-1] + data.draw(st.integers(1, 9))
        second = Mesh(dict(second.axes), ranks=range(start, start + second.size), name="s1")
        shape = (first.size * second.size,) * data.draw(st.integers(1, 2))
        source, target = (data.draw(even_attrs(mesh, len(shape), mesh.names)) for mesh in (first, second))
    else:
        first, second = data.draw(worlds(12))
        shape = data.draw(shapes())
        source, target = (data.draw(attrs(mesh, shape, pending=())) for mesh in (first, second))
    here, there = (Layout(mesh, attr.normalize(shape, mesh)) for mesh, attr in ((first, source), (second, target)))
    per_node = data.draw(NODES)
    least = data.draw(st.sampled_from([2, 16, 1 << 18]))
    messages = exchanges.messages
    with (
        mock.patch.object(exchanges, "LEAST", least),
        mock.patch.object(exchanges, "messages", lambda *args: messages(*args, least=least)),
    ):
        wanted = listed(here, there, shape, per_node)
        found = busiest.__wrapped__(here, there, shape, per_node)
    assert found == wanted


def all_layouts(mesh: Mesh, dims: int) -> list[Layout]:
    found = []
    for places in itertools.product(range(-1, dims), repeat=len(mesh.names)):
        axes = [[axis for axis, at in zip(mesh.names, places, strict=True) if at == d] for d in range(dims)]
        found += [
            Layout(mesh, DistAttr.split(*order)) for order in itertools.product(*map(itertools.permutations, axes))
        ]
    return found


NODES_ARE_AXES = [(Mesh(dp=2, tp=2), 2), (Mesh(dp=4, tp=4), 4), (Mesh(dp=2, tp=8), 8), (Mesh(a=2, b=2, c=2), 4)]


@pytest.mark.parametrize(("mesh", "per_node"), NODES_ARE_AXES)
def test_even_pieces_are_counted_where_nodes_are_axes(mesh: Mesh, per_node: int) -> None:
    layouts, shape = all_layouts(mesh, 2), (64, 64)
    for here, there in itertools.product(layouts, repeat=2):
        parts = part_pairs(here, there, shape)
        assert parts is not None
        counted = counted_on_mesh(parts, (), mesh, per_node)
        assert counted == listed(here, there, shape, per_node), (here, there)


@pytest.mark.parametrize(("mesh", "per_node"), [(Mesh(dp=4, tp=4), 8), (Mesh(a=2, b=4, c=2), 4), (Mesh(a=4, b=2), 4)])
def test_even_pieces_are_counted_where_a_node_has_a_part_of_an_axis(mesh: Mesh, per_node: int) -> None:
    """Few have to be listed: whether the nearest holder is on the same node is then not known."""
    layouts, shape, unknown = all_layouts(mesh, 2), (64, 64), 0
    pairs = list(itertools.product(layouts, repeat=2))
    for here, there in pairs:
        parts = part_pairs(here, there, shape)
        assert parts is not None
        counted = counted_on_mesh(parts, (), mesh, per_node)
        unknown += counted is None
        assert counted in (None, listed(here, there, shape, per_node)), (here, there)
    assert unknown <= len(pairs) / 20


def test_stages_on_their_own_nodes_are_counted() -> None:
    first, second = Mesh(dp=2, tp=8, name="s0"), Mesh(dp=2, tp=8, ranks=range(16, 32), name="s1")
    shape = (2048, 2048)
    for here, there in itertools.product(all_layouts(first, 2), all_layouts(second, 2)):
        parts = part_pairs(here, there, shape)
        assert parts is not None
        counted = counted_between(parts, 2, first, second, 8)
        assert counted == listed(here, there, shape, 8), (here, there)


def test_a_count_lists_no_messages() -> None:
    """On a mesh of any size."""
    mesh, shape = Mesh(dp=128, tp=8), (8192, 8192)
    here, there = (Layout(mesh, DistAttr.split(*dims)) for dims in (("dp", "tp"), ("tp", "dp")))
    with mock.patch.object(exchanges, "messages", side_effect=AssertionError):
        assert busiest.__wrapped__(here, there, shape, 8) == (2**16, 17, True)


@pytest.mark.parametrize(("after", "far"), [(("b", "c", "x"), False), (("c", "b", "x"), True)])
def test_replicas_on_other_nodes_are_asked_where_no_holder_needs_its_piece(after: tuple[str, ...], far: bool) -> None:
    """Two ranks on the node x need a piece of two holders, one on each node; if one has it already, one is left."""
    mesh, shape = Mesh(x=2, b=2, c=2, d=2), (2, 2, 2)
    here, there = (Layout(mesh, DistAttr.split(*dims)) for dims in (("b", "c", "d"), after))
    found = busiest(here, there, shape, 8)
    assert found == listed(here, there, shape, 8)
    assert found[2] == far


def test_the_digits_of_a_node() -> None:
    assert node_digits(Mesh(dp=2, tp=4), 8) == ()
    assert node_digits(Mesh(dp=2, tp=8), 8) == (("dp", 0),)
    assert node_digits(Mesh(dp=4, tp=4), 8) == (("dp", 0),)
    assert node_digits(Mesh(dp=2, tp=4, ranks=range(8, 16)), 8) == ()
    assert node_digits(Mesh(dp=2, tp=4, ranks=range(4, 12)), 8) is None  # from the middle of a node on
    assert node_digits(Mesh(dp=2, tp=4, ranks=range(0, 16, 2)), 8) == (("dp", 0),)  # four ranks on a node
    assert node_digits(Mesh(dp=2, tp=4, ranks=range(1, 80, 10)), 8) == (("dp", 0), ("tp", 0), ("tp", 1))
    assert node_digits(Mesh(dp=2, tp=3), 4) is None
