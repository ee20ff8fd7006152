"""The bytes of transitions against an exhaustive search over everything that transfers can make of a value."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import attrs, meshes, shapes
from transition_runs import check, names, normal, read

from autopar.ir import transfers
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.ir.text.printer import print_type
from autopar.transitions import cost, plan, reductions, transitions

MESHES = [Mesh(a=2, b=2), Mesh(a=2, b=3), Mesh(a=4, b=2), Mesh(a=2, b=2, c=2)]


@pytest.fixture(scope="class")
def free_starts() -> Iterator[None]:
    """An exchange costs nothing but its bytes, so replicas are borrowed of small values too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reductions, "STARTED", 1)
        plan._transitions.cache_clear()
        yield
    plan._transitions.cache_clear()


def moves(here: TensorType, goal: TensorType) -> Iterator[tuple[Any, dict[str, Any]]]:
    """All transfers that could apply; what is pending in both is not reduced."""
    mesh, held = here.layout.mesh, dict(here.attr.pending)
    loose = [axis for axis in held if axis not in dict(goal.attr.pending)]
    dims, names = range(len(here.shape)), mesh.names
    for axis, dim in itertools.product(names, dims):
        yield transfers.slice, {"dim": dim, "axis": axis}
        yield transfers.all_gather, {"dim": dim, "axis": axis}
        yield transfers.pend, {"dim": dim, "axis": axis}
        if axis in loose:
            yield transfers.reduce_scatter, {"dim": dim, "axis": axis}
        yield from (
            (transfers.all_to_all, {"source": dim, "target": other, "axis": axis}) for other in dims if other != dim
        )
    yield from ((transfers.pend, {"axis": axis}) for axis in names)
    for count in range(1, len(loose) + 1):
        yield from (
            (transfers.all_reduce, {"axis": some[0] if count == 1 else some})
            for some in itertools.combinations(loose, count)
        )
    if here.attr.pending == goal.attr.pending:
        splits, parts = transfers.flat_splits(goal.attr, goal.shape)
        yield transfers.redistribute, {"splits": splits, **({} if parts is None else {"parts": parts})}


def least(source: TensorType, target: TensorType) -> int:
    """Dijkstra's algorithm over all types of the value."""
    start, goal = normal(source), normal(target)
    queue: list[tuple[int, int, TensorType]] = [(0, 0, start)]
    paid, count = {start: 0}, itertools.count(1)
    while queue:
        bytes, _, here = heapq.heappop(queue)
        if here == goal:
            return bytes
        if bytes > paid[here]:
            continue
        for function, given_ in moves(here, goal):
            try:
                new = transfers.BY_FUNCTION[function].infer(here, given_, {})
            except transfers.LayoutMismatch:
                continue
            total = bytes + transfers.received(function, here, given_, new)
            if total < paid.get(new, total + 1):
                paid[new] = total
                heapq.heappush(queue, (total, next(count), new))
    raise AssertionError(f"nothing leads from {source} to {target}")


@st.composite
def pairs(draw: st.DrawFn, shapes: list[tuple[int, ...]], pending: tuple[str, ...]) -> tuple[TensorType, TensorType]:
    mesh, shape = draw(st.sampled_from(MESHES)), draw(st.sampled_from(shapes))
    source, target = (draw(attrs(mesh, shape, pending=pending, max_parts=1)) for _ in range(2))
    return TensorType(shape, torch.int64, Layout(mesh, source)), TensorType(shape, torch.int64, Layout(mesh, target))


@pytest.mark.simulated
@settings(max_examples=50, deadline=None)
@given(pairs([(24,), (24, 48)], ("sum",)))
def test_no_search_finds_fewer_bytes_for_even_pieces(free_starts: None, pair: tuple[TensorType, TensorType]) -> None:
    source, target = pair
    mesh, kept = source.layout.mesh, dict(target.attr.pending)
    reduced = [axis for axis, _ in source.attr.pending if axis not in kept]
    outermost = min((mesh.names.index(axis) for axis in reduced), default=0)
    # replicas over slower links are not borrowed
    assume(all(axis in source.attr.axes for axis in mesh.names[:outermost]))
    assert cost(source, target) <= least(source, target), (
        print_type(source),
        print_type(target),
        transitions(source, target),
    )


@pytest.mark.simulated
@settings(max_examples=100, deadline=None)
@given(pairs([(24,), (24, 48), (12, 7), (5,), (24, 5)], ()))
def test_no_search_finds_fewer_bytes_between_splits(pair: tuple[TensorType, TensorType]) -> None:
    assert cost(*pair) <= least(*pair), (*map(print_type, pair), transitions(*pair))


@pytest.mark.simulated
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_borrowed_replicas_lead_to_the_same_pieces(free_starts: None, data: st.DataObject) -> None:
    mesh, shape = data.draw(meshes(max_ranks=8, permuted=True)), data.draw(shapes())
    source, target = (
        TensorType(shape, torch.int64, Layout(mesh, data.draw(attrs(mesh, shape, pending=kinds))))
        for kinds in (("sum", "max"), ("sum",))
    )
    kinds = dict(source.attr.pending)
    assume(all(kinds.get(axis, "sum") == "sum" for axis, _ in target.attr.pending))
    check(source, target)


BORROWED = {  # on a=8 b=8: (from, to): transfers, MiB
    ("8192 8192] +a", "8192 8192]"): ("slice all_reduce all_gather", 280),
    ("8192 8192] +max:a", "8192 8192]"): ("slice all_reduce all_gather", 280),
    ("8192 8192] +a", "8192/a 8192]"): ("slice reduce_scatter all_gather", 56),
    ("8192 8192] +a", "8192/a/b 8192]"): ("slice reduce_scatter", 28),
    ("8192 8192] +a", "8192/b 8192]"): ("slice all_reduce", 56),
    ("8192 8192] +b", "8192 8192]"): ("all_reduce", 448),  # links along a may be slower
    ("8192 8192] +a +b", "8192/a/b 8192]"): ("reduce_scatter reduce_scatter", 252),
    ("8192 8192] +a +b", "8192/a 8192]"): ("reduce_scatter reduce_scatter all_gather", 280),  # little is left for a
    ("512 512] +a +b", "512/a 512]"): ("reduce_scatter all_reduce", 1.09375),
    ("512 512] +a", "512 512]"): ("all_reduce", 1.75),  # not worth two more exchanges
}


@pytest.mark.parametrize(("before", "after"), BORROWED)
def test_replicas_are_borrowed_where_it_pays(before: str, after: str) -> None:
    source, target = (read(f"f32[{text}", "a=8 b=8") for text in (before, after))
    assert (" ".join(names(source, target)), cost(source, target) / 2**20) == BORROWED[before, after]


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        # the first of three ranks gets all: 64 bytes scattered, 43 all-reduced
        ("f64[4] +dp", "f64[(1/dp 4)]", "all_reduce slice"),
        ("f64[9] +dp", "f64[9/dp]", "reduce_scatter"),
        ("f64[8] +dp", "f64[8/dp]", "reduce_scatter"),
        ("f64[1 4] +max:dp", "f64[1/dp 4]", "all_reduce slice"),
    ],
)
def test_where_scattering_would_pad_much_all_is_reduced(before: str, after: str, wanted: str) -> None:
    source, target = read(before, "dp=3"), read(after, "dp=3")
    check(source, target)
    assert names(source, target) == wanted.split()


def test_the_innermost_axis_is_reduced_first() -> None:
    """Slower links carry what is left."""
    for after in ("8192/a 8192/b]", "8192/a/b 8192]"):
        steps = transitions(read("f32[8192 8192] +a +b", "a=8 b=8"), read(f"f32[{after}", "a=8 b=8"))
        assert [(dict(step.arguments)["axis"], step.bytes // 2**20) for step in steps] == [("b", 224), ("a", 28)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("i64[24/b]", "i64[24/a] +b"),  # made of the only splits, and cut afterwards
        ("i64[24/a/b 48]", "i64[24/a/c 48] +b"),  # behind some of the goal's
        ("i64[24 48/b/a]", "i64[24 48] +a +b"),  # in the order in which the value is split
        ("i64[24/b 5/a]", "i64[24 5] +a +b +c"),
    ],
)
def test_what_is_split_becomes_pending_without_communication(before: str, after: str) -> None:
    source, target = (read(text, "a=2 b=3 c=2") for text in (before, after))
    check(source, target)
    assert cost(source, target) == 0
