"""What the busiest of many ranks moves, counted on a few of them, beside the list of all messages."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.costs import fewer_ranks
from autopar.costs.exchanges import busiest, listed
from autopar.costs.fewer_ranks import MOST_LISTED, FewerRanks, busiest_of_many
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh

AXES = ("a", "b", "c")


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[Layout, Layout, tuple[int, ...]]:
    mesh = Mesh({axis: draw(st.integers(1, 4 - k)) for k, axis in enumerate(AXES)})
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=2)))
    pending = (("a", "sum"),) if draw(st.booleans()) else ()

    def layout() -> Layout:
        dims: list[list[str]] = [[] for _ in shape]
        for axis in draw(st.permutations([axis for axis in AXES if axis not in dict(pending)])):
            if (at := draw(st.integers(0, len(shape)))) < len(shape):
                dims[at].append(axis)
        attr = DistAttr(tuple(((None, tuple(axes)),) for axes in dims), pending)
        return Layout(mesh, attr.normalize(shape, mesh))

    return layout(), layout(), shape


MORE_RANKS_HAVE_LESS = tuple(  # 5 rows are on 3 ranks, and 4 rows on 4
    Layout(Mesh(a=4, c=2), DistAttr.split(*dims)) for dims in ((("c", "a"), None), ("c", "a"))
)


@settings(max_examples=300, deadline=None)
@given(exchanges(), st.sampled_from([1, 2, 4, 6, 100]))
@example((*MORE_RANKS_HAVE_LESS, (9, 1)), 1)
def test_a_few_ranks_stand_for_all(exchange: tuple[Layout, Layout, tuple[int, ...]], ranks_per_node: int) -> None:
    """Elements and partners are those of the list; that a message leaves its node is never missed."""
    all_ranks, few = listed(*exchange, ranks_per_node), busiest_of_many(*exchange, ranks_per_node)
    assert few[:2] == all_ranks[:2]
    assert few[2] >= all_ranks[2]


def test_axes_that_repeat_an_exchange_are_left_out() -> None:
    mesh = Mesh(dp=2048, tp=8, ep=3)
    source, target = (
        Layout(mesh, DistAttr((((None, ("dp", *more)),), ((None, other),))))
        for more, other in ((("tp",), ()), ((), ("tp",)))
    )
    few = FewerRanks.of(source, target, (16_383, 1001))
    assert few.source.mesh.axes == (("tp", 8),) and few.shape == (8, 1001)
    assert (few.alone, few.alike) == (("dp",), ("ep",))


@pytest.mark.parametrize(("rows", "columns"), [(16_384, 1024), (16_383, 1001), (8, 7)])
def test_no_list_is_long(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 16,384 ranks at most ``MOST_LISTED`` ranks are listed, also where all of them exchange data."""
    sizes = []
    messages = fewer_ranks.messages
    monkeypatch.setattr(fewer_ranks, "messages", lambda a, b, shape: sizes.append(a.mesh.size) or messages(a, b, shape))
    fewer_ranks._listed.cache_clear()
    mesh = Mesh(dp=2048, tp=8)
    splits = (
        (("dp",), ()),
        ((), ("dp",)),
        (("dp", "tp"), ()),
        (("tp", "dp"), ()),
        (("tp",), ("dp",)),
        (("dp",), ("tp",)),
    )
    layouts = [Layout(mesh, DistAttr((((None, a),), ((None, b),)))) for a, b in splits]
    for source in layouts:
        for target in layouts:
            elements, partners, _ = busiest(source, target, (rows, columns), 64)
            assert (
                1 <= partners <= mesh.size
                and (elements == 0) == (partners == 1)
                and (elements == 0 or source != target)
            )
    assert all(size <= MOST_LISTED for size in sizes)
