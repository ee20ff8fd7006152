"""The seconds of transitions against an exhaustive search over everything that transfers can make of a value."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import attrs, kinds, meshes, shapes, worlds
from transition_runs import check, normal, read

from autopar.costs.machine import Link, Machine, machine
from autopar.ir import transfers
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.ir.text.printer import print_type
from autopar.transitions import duration, plan, transitions
from autopar.transitions.axis_prices import prices_of
from autopar.transitions.chain import TransferStep
from autopar.transitions.fastest import fastest_path, nanoseconds
from autopar.transitions.path_search import Search
from autopar.transitions.states import Moves

FEW = {"ranks_per_node": 2}
H100 = machine("NVIDIA H100 80GB HBM3")
MACHINES = [
    replace(machine("generic"), **FEW), machine("cpu"), replace(H100, name="H100, two a node", **FEW), H100,
    replace(H100, name="slow network", outside=Link(1e-3, 1e8), ranks_per_node=4),
    Machine("all bytes", "any", 2, Link(1e-9, 1e9), Link(2e-9, 1e8), Link(1e-9, 1e10)),
]  # fmt: skip
MESHES = [Mesh(a=2, b=2), Mesh(a=2, b=3), Mesh(a=4, b=2), Mesh(a=2, b=2, c=2)]


# -- exhaustively ------------------------------------------------------------------------------------------------------


@functools.cache
def states(mesh: Mesh, dims: int) -> list[tuple[tuple[str, ...], ...]]:
    """The splits that plain dims can have."""
    found = []
    for places in itertools.product(range(-1, dims), repeat=len(mesh.names)):
        axes = [[axis for axis, at in zip(mesh.names, places, strict=True) if at == d] for d in range(dims)]
        found += list(itertools.product(*map(itertools.permutations, axes)))
    return found


def moves(here: TensorType, start: TensorType, goal: TensorType) -> Iterator[tuple[Any, dict[str, Any]]]:
    """All transfers that could apply, to any splits; no axis becomes pending to be reduced."""
    mesh, held = here.layout.mesh, dict(here.attr.pending)
    linear = start.dtype == goal.dtype or start.dtype.itemsize < goal.dtype.itemsize
    wanted = dict(goal.attr.pending)
    casts = start.dtype != goal.dtype and here.dtype == goal.dtype
    loose = [axis for axis in held if axis in dict(start.attr.pending) and (linear or not casts)]
    kind = next(iter(held.values()), "sum")
    dims, names = range(len(here.shape)), mesh.names
    for axis, dim in itertools.product(names, dims):
        yield transfers.slice, {"dim": dim, "axis": axis}
        yield transfers.all_gather, {"dim": dim, "axis": axis}
        if axis in wanted:
            yield transfers.pend, {"dim": dim, "axis": axis, "op": wanted[axis]}
        if axis in loose:
            yield transfers.reduce_scatter, {"dim": dim, "axis": axis, "op": kind}
        yield from (
            (transfers.all_to_all, {"source": dim, "target": other, "axis": axis}) for other in dims if other != dim
        )
    yield from ((transfers.pend, {"axis": axis, "op": wanted[axis]}) for axis in wanted)
    for count in range(1, len(loose) + 1):
        yield from (
            (transfers.all_reduce, {"axis": some[0] if count == 1 else some, "op": kind})
            for some in itertools.combinations(loose, count)
        )
    if here.dtype != goal.dtype and (linear or not held):
        yield transfers.cast, {"dtype": goal.dtype}
    for splits in states(mesh, len(here.shape)):
        if not {axis for axes in splits for axis in axes} & set(held):
            yield transfers.redistribute, {"splits": splits}


def least(source: TensorType, target: TensorType, on: Machine) -> int:
    """Dijkstra's algorithm over all types of the value that plain dims can have; no more than what was found."""
    start, goal = normal(source), normal(target)
    limit = duration(source, target, on)
    queue: list[tuple[int, int, TensorType]] = [(0, 0, start)]
    paid, count = {start: 0}, itertools.count(1)
    while queue:
        spent, _, here = heapq.heappop(queue)
        if here == goal:
            return spent
        if spent > paid[here]:
            continue
        for function, given_ in moves(here, start, goal):
            try:
                new = infer(function, here, tuple(given_.items()))
            except transfers.LayoutMismatch:
                continue
            if new == here:
                continue
            price = nanoseconds_of(function, here, tuple(given_.items()), new, on)
            if function is transfers.redistribute and not price:
                continue  # slices, whose price is that of a copy
            total = spent + price
            if total < min(paid.get(new, total + 1), limit + 1):
                paid[new] = total
                heapq.heappush(queue, (total, next(count), new))
    return limit + 1  # with parts of dims there are better ones


@functools.lru_cache(maxsize=1 << 18)
def infer(function: Any, here: TensorType, given_: tuple[tuple[str, Any], ...]) -> TensorType:
    return transfers.BY_FUNCTION[function].infer(here, dict(given_), {})


@functools.lru_cache(maxsize=1 << 18)
def nanoseconds_of(
    function: Any, here: TensorType, given_: tuple[tuple[str, Any], ...], new: TensorType, on: Machine
) -> int:
    return nanoseconds(here, [TransferStep(function, given_, new, 0)], on)


@st.composite
def even_pairs(draw: st.DrawFn) -> tuple[TensorType, TensorType]:
    mesh, shape = draw(st.sampled_from(MESHES)), draw(st.sampled_from([(24,), (24, 48), (240, 480), (2400, 4800)]))
    kind = draw(st.sampled_from(["sum", "sum", "max"]))
    before, after = draw(
        st.sampled_from([(torch.float32,) * 2] * 3 + [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
    )
    ends = [draw(attrs(mesh, shape, pending=(kind,), max_parts=1)) for _ in range(2)]
    return tuple(
        TensorType(shape, dtype, Layout(mesh, attr)) for dtype, attr in zip((before, after), ends, strict=True)
    )


@pytest.mark.simulated
@settings(max_examples=60, deadline=None)
@given(even_pairs(), st.sampled_from(MACHINES))
def test_no_search_finds_fewer_nanoseconds_for_even_pieces(pair: tuple[TensorType, TensorType], on: Machine) -> None:
    source, target = pair
    assert duration(source, target, on) <= least(source, target, on), (
        on.name,
        print_type(source),
        print_type(target),
        transitions(source, target, on),
    )


@pytest.mark.simulated
@settings(max_examples=40, deadline=None)
@given(st.data(), even_pairs(), st.sampled_from(MACHINES))
def test_moves_lead_back_and_have_the_price_of_their_transfer(
    data: st.DataObject, pair: tuple[TensorType, TensorType], on: Machine
) -> None:
    start, goal = map(normal, pair)
    moves = moves_between(start, goal, on)
    state, type = moves.start, start
    for _ in range(4):
        edges = list(moves.after(state))
        for price, after, move in edges:
            assert (price, state, move) in moves.before(after)
        for price, before, move in moves.before(state):
            assert (price, state, move) in moves.after(before)
        if not edges:
            break
        price, after, move = data.draw(st.sampled_from(edges))
        function, given_ = moves.transfer(move, state, after)
        new = transfers.BY_FUNCTION[function].infer(type, given_, {})
        assert price == nanoseconds_of(function, type, tuple(given_.items()), new, on)
        state, type = after, new


def moves_between(start: TensorType, goal: TensorType, on: Machine) -> Moves:
    prices = prices_of(start.mesh, on)
    number = {name: k for k, name in enumerate(prices.names)}
    splits = (tuple(tuple(number[axis] for axis in axes) for ((_, axes),) in end.attr.dims) for end in (start, goal))
    return Moves(start, goal, plan._Task.of(start, goal).linear, prices, tuple((n,) for n in start.shape), *splits)


@pytest.mark.simulated
@settings(max_examples=100, deadline=None)
@given(even_pairs(), st.sampled_from(MACHINES))
def test_bounds_are_no_more_than_prices(pair: tuple[TensorType, TensorType], on: Machine) -> None:
    start, goal = map(normal, pair)
    moves = moves_between(start, goal, on)
    search = Search(moves, (1 << 62, 0, 0))
    path = search.run()
    assert path is not None and search.to_goal(moves.start) <= search.best[0]
    total, state = 0, moves.start
    for move, after in path:
        if move[0] == "redistribute":
            price = moves.exchange(state, after)
            assert search._least_exchange(state, after) <= price
        else:
            price = next(cost for cost, found, way in moves.after(state) if (found, way) == (after, move))
        total, state = total + price, after
        assert search.to_goal(state) <= search.best[0] - total
        assert search._bound(moves.start, state) <= total
    assert total == search.best[0]


@st.composite
def pairs_in_parts(draw: st.DrawFn) -> tuple[TensorType, TensorType]:
    mesh = draw(st.sampled_from([Mesh(a=2, b=2), Mesh(a=4, b=2), Mesh(a=2, b=2, c=2), Mesh(a=2, b=3), Mesh(a=4, b=6)]))
    shape = draw(st.sampled_from([(16, 48), (48, 16), (4, 24, 8), (96, 8), (768,), (48, 4, 4)]))
    before, after = draw(st.sampled_from([(torch.float32,) * 2, (torch.bfloat16, torch.float32)]))
    ends = [draw(attrs(mesh, shape, pending=("sum",), max_parts=2)) for _ in range(2)]
    return tuple(
        normal(TensorType(shape, dtype, Layout(mesh, attr))) for dtype, attr in zip((before, after), ends, strict=True)
    )


@pytest.mark.simulated
@settings(max_examples=200, deadline=None)
@given(pairs_in_parts(), st.sampled_from(MACHINES))
def test_a_path_of_a_class_is_a_fastest_one_of_each_of_its_pairs(
    pair: tuple[TensorType, TensorType], on: Machine
) -> None:
    """Paths of earlier examples serve later ones, so that a class of pairs that differ shows."""
    found = fastest_path(*pair, True, on)
    if found is None or pair[0] == pair[1]:
        return
    search = Search(found.moves, (1 << 62, 0, 0))
    assert search.run() is not None
    redistributes = sum(move[0] == "redistribute" for move, _ in found.path)
    assert (sum(found.prices), len(found.path), redistributes) == search.best
    type = pair[0]
    state = found.moves.start
    for (move, after), price in zip(found.path, found.prices, strict=True):
        function, given_ = found.moves.transfer(move, state, after)
        new = transfers.BY_FUNCTION[function].infer(type, given_, {})
        assert (new.attr, price) == (
            found.moves.attr(after), nanoseconds_of(function, type, tuple(given_.items()), new, on)
        )  # fmt: skip
        type, state = new, after
    assert type == pair[1]


CHOSEN = {  # on dp=8 tp=8, with eight ranks on a node: (from, to): transfers, µs
    ("8192/dp/tp 8192]", "8192 8192/dp/tp]"): ("all_to_all redistribute all_to_all", 154),
    ("8192/dp 8192]", "8192 8192/dp]"): ("redistribute all_gather", 176),
    ("8192/dp 8192]", "8192 8192/tp]"): ("slice all_gather", 630),
    ("8192/dp 8192/tp]", "8192/tp 8192/dp]"): ("redistribute", 96),
    ("8192/tp 8192] +dp", "8192 8192/tp] +dp"): ("all_to_all", 100),
    ("8192 8192] +dp", "8192 8192]"): ("slice all_reduce all_gather", 1807),
    ("8192 8192] +dp", "8192/dp 8192]"): ("slice reduce_scatter all_gather", 727),
    ("8192 8192] +dp +tp", "8192 8192]"): ("all_reduce", 2320),  # it goes level by level
    ("8192/tp 8192] +dp", "8192/dp 8192]"): ("reduce_scatter redistribute all_gather", 799),
    ("8192 8192]", "8192 8192] +dp +tp"): ("slice pend pend", 122),
    ("8192/dp 8192/tp]", "8192 8192] +dp +tp"): ("pend pend", 98),
    ("8192 8192] +dp +tp", "8192/dp 8192] +tp"): ("reduce_scatter reduce_scatter pend", 1174),
    ("64 64] +dp +tp", "64 64]"): ("all_reduce all_reduce", 52),
    ("64/dp 64/tp]", "64 64]"): ("all_gather redistribute all_gather", 42),
}


@pytest.mark.parametrize(("before", "after"), CHOSEN)
def test_what_a_machine_chooses(before: str, after: str) -> None:
    source, target = (read(f"f32[{text}", "dp=8 tp=8") for text in (before, after))
    steps = transitions(source, target, H100)
    found = " ".join(step.function.__name__ for step in steps), round(duration(source, target, H100) / 1000)
    assert found == CHOSEN[before, after]


# -- any two layouts ---------------------------------------------------------------------------------------------------


@st.composite
def any_pairs(draw: st.DrawFn, mesh: Mesh) -> tuple[TensorType, TensorType]:
    shape = draw(st.one_of(shapes(), st.sampled_from([(24,), (24, 48), (8, 8, 8)])))
    dtypes = draw(
        st.sampled_from(
            [(torch.int64,) * 2, (torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
        )
    )
    source = draw(attrs(mesh, shape, pending=kinds(dtypes[0]) if len(set(dtypes)) == 1 else ("sum", "max")))
    target = draw(attrs(mesh, shape, pending=kinds(dtypes[1])))
    held = dict(source.pending)
    target = replace(target, pending=tuple(pair for pair in target.pending if held.get(pair[0], pair[1]) == pair[1]))
    return TensorType(shape, dtypes[0], Layout(mesh, source)), TensorType(shape, dtypes[1], Layout(mesh, target))


@pytest.mark.simulated
@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(MACHINES))
def test_every_rank_holds_its_piece(data: st.DataObject, on: Machine) -> None:
    mesh = data.draw(meshes(max_ranks=8, permuted=True))
    source, target = data.draw(any_pairs(mesh))
    check(source, target, machine=on)


@pytest.mark.simulated
@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(MACHINES))
def test_every_rank_holds_its_piece_on_another_mesh(data: st.DataObject, on: Machine) -> None:
    first, second = data.draw(worlds(6))
    shape = data.draw(shapes(2))
    source, target = (data.draw(attrs(mesh, shape)) for mesh in (first, second))
    ends = (TensorType(shape, torch.int64, Layout(mesh, attr)) for mesh, attr in ((first, source), (second, target)))
    check(*ends, world=Mesh(r=6), machine=on)


@pytest.mark.simulated
@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(MACHINES))
def test_fewest_bytes_are_no_faster(data: st.DataObject, on: Machine) -> None:
    source, target = data.draw(any_pairs(data.draw(meshes(max_ranks=12, permuted=True))))
    by_bytes = transitions(source, target)
    steps = transitions(source, target, on)
    # what is chosen by bytes may exchange nothing in a redistribute, which costs less than slices
    assert nanoseconds(normal(source), steps, on) <= nanoseconds(normal(source), by_bytes, on), (
        print_type(source),
        print_type(target),
        steps,
        by_bytes,
    )
    assert duration(source, target, on) == nanoseconds(normal(source), steps, on)
    here = normal(source)
    for step in steps:
        given_ = dict(step.arguments)
        new = transfers.BY_FUNCTION[step.function].infer(here, given_, {})
        assert new == step.type == normal(new) != here
        here = new
    assert here == normal(target)
