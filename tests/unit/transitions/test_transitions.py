"""Transitions between two Layouts: run on all simulated ranks, by name, and refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import UNREDUCED, attrs, kinds, meshes, shapes
from transition_runs import check, explicit_program, names, normal, read, run

from autopar.errors import TransitionError
from autopar.ir import boxes, transfers
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.record import DTYPES, TensorType
from autopar.runtime.localize import localize
from autopar.transitions import chain, cost, plan, transitions

# -- any two Layouts ---------------------------------------------------------------------------------------------


@st.composite
def pairs(
    draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...], dtypes: st.SearchStrategy
) -> tuple[TensorType, TensorType]:
    """A source and a target, pending in any way; an axis that is pending at both ends keeps its kind."""
    first, second = draw(dtypes)
    before = () if first in UNREDUCED else kinds(first)
    if first != second:
        before = tuple(kind for kind in before if kind != "prod")  # too large to be cast to some
    source = draw(attrs(mesh, shape, pending=before))
    target = draw(attrs(mesh, shape, pending=kinds(second)))
    held = dict(source.pending)
    target = replace(target, pending=tuple(pair for pair in target.pending if held.get(pair[0], pair[1]) == pair[1]))
    return TensorType(shape, first, Layout(mesh, source)), TensorType(shape, second, Layout(mesh, target))


EVERY = list(DTYPES.values())
SAME = st.sampled_from(EVERY).map(lambda dtype: (dtype, dtype))
ANY = st.tuples(st.sampled_from(EVERY), st.sampled_from(EVERY)).filter(
    lambda two: two[1].is_complex >= two[0].is_complex
)


@pytest.mark.simulated
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_rank_holds_its_piece(data: st.DataObject) -> None:
    mesh, shape = data.draw(meshes(max_ranks=12, permuted=True)), data.draw(shapes())
    check(*data.draw(pairs(mesh, shape, SAME)))


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_casts_keep_the_value(data: st.DataObject) -> None:
    mesh, shape = data.draw(meshes(max_ranks=8)), data.draw(shapes(2))
    source, target = data.draw(pairs(mesh, shape, ANY))
    check(source, target)
    casts = [step for step in transitions(source, target) if step.function is transfers.cast]
    assert len(casts) == (source.dtype != target.dtype)


@pytest.mark.simulated
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_types_follow_from_the_transfers(data: st.DataObject) -> None:
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    source, target = data.draw(pairs(mesh, shape, ANY))
    here, paid = normal(source), 0
    for step in transitions(source, target):
        given = dict(step.arguments)
        new = transfers.BY_FUNCTION[step.function].infer(here, given, {})
        assert new == step.type == normal(new) != here
        assert step.bytes == transfers.received(step.function, here, given, new)
        narrows = step.type.dtype.itemsize < here.dtype.itemsize
        assert not (narrows and here.attr.pending), "a pending value is narrowed"
        here, paid = new, paid + step.bytes
    assert here == normal(target)
    assert paid == cost(source, target)
    assert (transitions(source, target) == ()) == (normal(source) == normal(target))


# -- cases by name -------------------------------------------------------------------------------------------------

CASES = {  # name: (source, target, transfers, bytes)
    "S(0)R to RS(0)": ("f32[8/dp 8]", "f32[8/tp 8]", "all_gather slice", 128),
    "swap S(0)S(1)": ("f32[8/dp 8/tp]", "f32[8/tp 8/dp]", "redistribute", 64),
    "P to S": ("f32[8 8] +tp", "f32[8 8/tp]", "reduce_scatter", 128),
    "P to R": ("f32[8 8] +tp", "f32[8 8]", "all_reduce", 256),
    "max P to R": ("f32[8 8] +max:tp", "f32[8 8]", "all_reduce", 256),
    "P P to R": ("f32[8 8] +dp +tp", "f32[8 8]", "all_reduce", 384),
    "P P to P R": ("f32[8 8] +dp +tp", "f32[8 8] +dp", "all_reduce", 256),
    "P P to S": ("f32[8 8] +dp +tp", "f32[8/dp/tp 8]", "reduce_scatter reduce_scatter", 192),
    "P S(0) to S(0) R": ("f32[8/tp 8] +dp", "f32[8/dp 8]", "reduce_scatter redistribute", 64 + 128),
    "avg P to S": ("f32[8 8] +avg:tp", "f32[8/tp 8]", "reduce_scatter", 128),
    "R to P": ("f32[8 8]", "f32[8 8] +tp", "pend", 0),
    "R to max P": ("f32[8 8]", "f32[8 8] +max:tp", "pend", 0),
    "S to max P": ("f32[8/dp 8]", "f32[8 8] +max:dp", "pend", 0),
    "S to avg P": ("f32[8/dp 8]", "f32[8 8] +avg:dp", "all_gather pend", 128),
    "P to the other P": ("f32[8 8] +max:tp", "f32[8 8] +max:dp", "slice all_reduce pend", 128),
    "S to R": ("f32[8/dp 8]", "f32[8 8]", "all_gather", 128),
    "R to S": ("f32[8 8]", "f32[8 8/dp]", "slice", 0),
    "S(0) to S(1)": ("f32[8/dp 8]", "f32[8 8/dp]", "all_to_all", 64),
    "S to P": ("f32[8/dp 8]", "f32[8 8] +dp", "pend", 0),
    "the major of two axes": ("f32[8/dp/tp]", "f32[8/tp]", "redistribute", 16),
    "merged to whole": ("f32[(3 8/tp)]", "f32[24]", "all_gather", 48),
    "merged uneven to plain": ("f32[(5/dp 128)]", "f32[640/dp]", "redistribute", 256),
    "uneven": ("f32[5/dp]", "f32[5]", "all_gather", 12),
    "nothing": ("f32[(2/dp 4) 8/tp]", "f32[8/dp 8/tp]", "", 0),
    "no dims": ("f32[] +dp", "f32[]", "all_reduce", 4),
}


@pytest.mark.parametrize("name", CASES)
def test_cases_by_name(name: str) -> None:
    before, after, wanted, paid = CASES[name]
    source, target = read(before, "dp=2 tp=2"), read(after, "dp=2 tp=2")
    check(source, target)
    steps = transitions(source, target)
    assert " ".join(step.function.__name__ for step in steps) == wanted
    assert cost(source, target) == paid


def test_ceil_pieces_of_five_over_four() -> None:
    source, target = read("i64[5/dp 4]", "dp=4"), read("i64[5 4/dp]", "dp=4")
    found = check(source, target)
    assert [tuple(piece.shape) for piece in found.values()] == [(5, 1)] * 4
    local = str(localize(explicit_program(source, target), {"dp": 2}))
    assert "x : i64[1 4] = input" in local
    assert "x_dp : i64[5 1] = all_to_all(x, 0, 1, dp, sizes=[2, 2, 1, 0], new_sizes=[1, 1, 1, 1])" in local


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ("f32[8/dp]", "bf16[8]", "cast all_gather"),  # narrow, then move
        ("bf16[8/dp]", "f32[8]", "all_gather cast"),  # move, then widen
        ("f32[8] +dp", "bf16[8]", "all_reduce cast"),  # a pending sum is not narrowed
        ("f32[8] +dp", "bf16[8/dp]", "reduce_scatter cast"),
        ("f32[8/tp] +dp", "bf16[8]", "reduce_scatter cast all_gather all_gather"),
        ("f32[8] +dp", "bf16[8] +dp", "reduce_scatter cast pend"),
        ("i64[8] +dp", "bool[8] +dp", "reduce_scatter cast pend"),
        ("bool[8] +dp", "f32[8] +dp", "reduce_scatter cast pend"),  # True + True is True, 1 + 1 is 2
        ("bf16[8] +dp", "f32[8] +dp", "cast"),
        ("bf16[8] +dp", "f32[8]", "all_reduce cast"),
        ("f32[8]", "bf16[8]", "cast"),
    ],
)
def test_casts_stand_where_fewer_bytes_move(before: str, after: str, wanted: str) -> None:
    source, target = read(before, "dp=2 tp=2"), read(after, "dp=2 tp=2")
    check(source, target)
    assert names(source, target) == wanted.split()


def test_small_addends_survive_the_reduction() -> None:
    """1 + 1/256 + 1/256 is lost when the partial sums are narrowed to bfloat16 one by one."""
    source, target = read("f32[1] +dp", "dp=3"), read("bf16[1]", "dp=3")
    found = check(source, target, torch.tensor([[1.0], [1 / 256], [1 / 256]]))
    assert found[0].item() == 1 + 2 / 256


def test_an_average_is_reduced_too() -> None:
    source, target = read("f32[2] +avg:dp", "dp=4"), read("f32[2]", "dp=4")
    found = run(source, target, {rank: torch.full((2,), float(rank)) for rank in range(4)})
    assert all(torch.equal(piece, torch.full((2,), 1.5)) for piece in found.values())


def test_a_max_may_be_reduced_and_held_as_a_sum_over_another_axis() -> None:
    source, target = read("f32[4/tp] +max:dp", "dp=2 tp=2"), read("f32[4/dp] +tp", "dp=2 tp=2")
    check(source, target, torch.tensor([[-3.0, 1, 2, 5], [0] * 4, [-4.0, 3, -2, 4], [0] * 4])[[0, 0, 2, 2]])
    assert [step.function for step in transitions(source, target)] == [
        transfers.all_reduce,
        transfers.pend,
        transfers.slice,
    ]


def test_axes_of_one_leave_no_trace() -> None:
    whole = read("f32[4]", "dp=2 one=1")
    for function, arguments in ((transfers.pend, {"axis": "one"}), (transfers.slice, {"dim": 0, "axis": "one"})):
        assert transfers.BY_FUNCTION[function].infer(whole, arguments, {}) == whole


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("f32[4] +dp", "f32[4] +max:dp",
         "over dp the ranks hold addends (pending sum), and would have to hold candidates for the largest (pending "
         "max); reduce the value over dp first"),
        ("f32[4] +max:dp", "f32[4/tp] +dp",
         "over dp the ranks hold candidates for the largest (pending max), and would have to hold addends (pending "
         "sum); reduce the value over dp first"),
        ("f32[4] +min:tp", "bf16[4] +prod:tp",
         "over tp the ranks hold candidates for the smallest (pending min), and would have to hold factors (pending "
         "prod); reduce the value over tp first"),
        ("f32[4] +avg:tp", "f32[4] +tp",
         "over tp the ranks hold values to be averaged (pending avg), and would have to hold addends (pending sum); "
         "reduce the value over tp first"),
        ("f32[4] +dp", "f32[4] +dp +max:tp",
         "f32[4] +dp +max:tp is pending max and sum at once, and these do not commute; reduce one first"),
        ("f32[4] +dp +max:tp", "f32[4]",
         "f32[4] +dp +max:tp is pending max and sum at once, and these do not commute; reduce one first"),
        ("i32[4/dp]", "i32[4] +avg:dp", "an average of torch.int32 is no torch.int32; only floating point is averaged"),
        ("bool[4] +avg:dp", "f32[4]", "an average of torch.bool is no torch.bool; only floating point is averaged"),
        ("c64[4]", "c64[4] +max:dp", "complex numbers have no max"),
        ("c64[4] +min:dp", "c64[4]", "complex numbers have no min"),
        ("u64[4] +max:dp", "u64[4]", "torch finds no max of torch.uint64; cast the value first"),
        ("f32[4]", "f32[4] +xor:dp", "there is no reduction 'xor'; there are sum, avg, max, min, prod"),
    ],
)  # fmt: skip
def test_refusals_name_both_and_say_why(before: str, after: str, why: str) -> None:
    with pytest.raises(TransitionError, match=f"^{re.escape(f'no transfers lead from {before} to {after}: {why}')}$"):
        transitions(read(before, "dp=2 tp=2"), read(after, "dp=2 tp=2"))


@pytest.mark.parametrize(
    ("before", "function", "arguments", "why"),
    [
        ("f32[4] +dp", transfers.all_reduce, {"axis": "dp", "op": "max"}, "the value is not pending max over dp"),
        ("f32[4] +dp", transfers.all_reduce, {"axis": "tp"}, "the value is not pending sum over tp"),
        ("f32[4] +max:dp", transfers.reduce_scatter, {"dim": 0, "axis": "dp"}, "the value is not pending sum over dp"),
        ("f32[4/dp/tp]", transfers.all_gather, {"dim": 0, "axis": "dp"}, "dim 0 is not split over dp last"),
        (
            "f32[4/dp 4]",
            transfers.all_to_all,
            {"source": 1, "target": 0, "axis": "dp"},
            "dim 1 is not split over dp last",
        ),
        ("f32[4/dp 4]", transfers.slice, {"dim": 1, "axis": "dp"}, "the value already uses the axis dp"),
        ("f32[4] +dp", transfers.slice, {"dim": 0, "axis": "dp"}, "the value already uses the axis dp"),
        ("f32[4] +dp", transfers.pend, {"axis": "dp"}, "the value already uses the axis dp"),
        ("f32[4/dp]", transfers.pend, {"axis": "dp"}, "the value already uses the axis dp"),
        ("f32[4/dp]", transfers.pend, {"axis": "tp", "dim": 0}, "dim 0 is not split over tp last"),
        (
            "f32[4/dp]",
            transfers.pend,
            {"axis": "dp", "dim": 0, "op": "avg"},
            "only a pending sum or max or min or prod can be made of pieces, no avg",
        ),
        (
            "f32[4] +dp",
            transfers.pend,
            {"axis": "tp", "op": "max"},
            "the value is pending sum already; reductions of two kinds do not commute",
        ),
        ("i64[4]", transfers.pend, {"axis": "tp", "op": "avg"}, "an average of torch.int64 is no torch.int64"),
        ("f32[4/dp 4]", transfers.redistribute, {"splits": (("dp",),)}, "1 splits are given for 2 parts"),
        ("f32[4/dp 4]", transfers.redistribute, {"splits": (("dp",), ("dp",))}, "the axis dp would be used twice"),
        ("f32[4] +dp", transfers.redistribute, {"splits": (("dp",),)}, "the axis dp would be used twice"),
        (
            "f32[4]",
            transfers.redistribute,
            {"splits": (("dp",), ()), "parts": ((2, 3),)},
            "the parts ((2, 3),) do not make the shape [4]",
        ),
        ("f32[4] +dp", transfers.send, {"stage": None}, "a pending value is reduced before it is sent"),
        ("f32[4]", transfers.recv, {"stage": "s9"}, "there is no stage 's9'; stages are none"),
        ("f32[4]", transfers.slice, {"dim": 1, "axis": "dp"}, "there is no dim 1 in a value of 1"),
        ("f32[(5/dp 2)]", transfers.all_gather, {"dim": 0, "axis": "dp"}, "dim 5/dp 2 is not split as parts of [10]"),
    ],
)
def test_transfers_that_do_not_apply(before: str, function: Any, arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(transfers.LayoutMismatch, match=re.escape(why)):
        transfers.BY_FUNCTION[function].infer(read(before, "dp=2 tp=2"), arguments, {})


@pytest.mark.parametrize(
    ("shape", "attr", "why"),
    [
        ((4,), DistAttr.split("zz"), "f32[4/zz] names the axis zz; the mesh has dp, tp"),
        ((4,), DistAttr.split(("dp", "dp")), "f32[4/dp/dp] uses the axis dp twice"),
        ((4,), DistAttr.split("dp", pending=["dp"]), "f32[4/dp] +dp uses the axis dp twice"),
        ((-4,), DistAttr.split(None), "a value has no shape [-4]"),
        ((12,), DistAttr((((5, ("dp",)), (2, ())),)), "the parts of f32[(5/dp 2)] do not make a dim of 12"),
        (
            (4,),
            DistAttr.split(None, pending={"dp": "xor"}),
            "there is no reduction 'xor'; there are sum, avg, max, min, prod",
        ),
        (
            (4,),
            DistAttr.split(None, pending={"dp": "max", "tp": "sum"}),
            "f32[4] +max:dp +tp is pending max and sum at once, and these do not commute; reduce one first",
        ),
    ],
)
def test_what_nothing_lies_as_is_refused_even_where_both_ends_are_alike(
    shape: tuple[int, ...], attr: DistAttr, why: str
) -> None:
    type = TensorType(shape, torch.float32, Layout(Mesh(dp=2, tp=2), attr))
    with pytest.raises(TransitionError, match=f": {re.escape(why)}$"):
        transitions(type, type)


def test_a_layout_has_as_many_dims_as_its_value() -> None:
    type = TensorType((4,), torch.float32, Layout(Mesh(dp=2), DistAttr.split("dp", None)))
    with pytest.raises(TransitionError, match=r"^a Layout of 2 dims is given to a value of 1$"):
        transitions(type, type)


def test_values_keep_their_shape_and_are_placed() -> None:
    whole = read("f32[4]", "dp=2")
    with pytest.raises(TransitionError, match=re.escape("a transition keeps the shape; (4,) is not (2, 2)")):
        transitions(whole, read("f32[2 2]", "dp=2"))
    for pair in ((whole, replace(whole, layout=None)), (replace(whole, layout=None), whole)):
        with pytest.raises(TransitionError, match="one of these has no Layout"):
            transitions(*pair)


# -- planning ------------------------------------------------------------------------------------------------------


def test_a_repeated_pair_is_found_once() -> None:
    source, target = read("f32[24/dp 7]", "dp=2 tp=2"), read("f32[24 7] +tp", "dp=2 tp=2")
    first = transitions(source, target)
    misses = plan._transitions.cache_info().misses
    assert transitions(replace(source), replace(target)) is first
    assert cost(source, target) == sum(step.bytes for step in first)
    assert plan._transitions.cache_info().misses == misses


@pytest.mark.parametrize(("dtype", "width"), [("i16", 4), ("u32", 8), ("f8e4m3", 4), ("i8", 1), ("f32", 4)])
def test_a_reduction_is_counted_in_the_dtype_in_which_it_is_done(dtype: str, width: int) -> None:
    (step,) = transitions(read(f"{dtype}[8 6] +dp", "dp=2"), read(f"{dtype}[8/dp 6]", "dp=2"))
    assert step.bytes == 4 * 6 * width


@pytest.mark.parametrize(
    ("before", "after", "most"),
    [
        ("f32[{n}/dp 64/tp]", "f32[{n}/tp 64/dp]", 3),
        ("f32[{n} 64] +cp", "f32[{n}/dp 64/tp]", 4),
        ("f32[{n} 64] +cp +dp +tp", "f32[{n} 64]", 2),
        ("f32[{n} 64/cp]", "f32[{n} 64] +cp +dp +tp", 13),
        ("f32[{n} 8 8 8 8] +cp +dp +tp", "bf16[{n} 8 8 8 8] +cp +dp +tp", 34),
    ],
)
def test_planning_a_new_pair_is_little_work(
    before: str, after: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: Layouts inferred and lacks computed, of a size that no other test has planned for."""
    source, target = (read(text.format(n=8 * 1009), "cp=4 dp=8 tp=8") for text in (before, after))
    assert 0 < (made := len(planned(source, target, monkeypatch))) <= most, made


@pytest.mark.parametrize(
    ("before", "after", "most"),
    [
        ("f32[{n} 512/c 512] +a +d", "f32[{n} 512/d/a 512] +c", 40),
        ("f32[(8/a {n}/d) 512 512] +b", "f32[{m}/c 512 512] +d", 40),
        ("f32[{n} (4/c 24/b)] +a +d", "f32[{n} 96/a] +b +c", 35),
        ("f32[{n} 512 512/b] +max:a +max:d", "f32[{n} 512 512/a] +max:b", 45),
    ],
)
def test_planning_a_new_pair_on_four_axes_is_little_work(
    before: str, after: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are dozens of ways to reduce these values. Types are inferred for the best alone."""
    n = 8 * 1013
    source, target = (read(text.format(n=n, m=8 * n), "a=2 b=2 c=2 d=2") for text in (before, after))
    assert 0 < (made := len(planned(source, target, monkeypatch))) <= most, made


def planned(source: TensorType, target: TensorType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is called to plan a new pair: Layouts inferred and lacks computed."""
    calls: list[tuple[Any, ...]] = []
    for count in (boxes.most_lacked, boxes.lacked_between):
        monkeypatch.setattr(plan, count.__name__, lambda *args, count=count: calls.append(args) or count(*args))
    for function, row in transfers.BY_FUNCTION.items():
        counted = replace(row, infer=lambda *args, infer=row.infer: calls.append(args) or infer(*args))
        monkeypatch.setitem(transfers.BY_FUNCTION, function, counted)
    plan._transitions.cache_clear()
    chain._exchange.cache_clear()
    chain._step.cache_clear()
    transitions(source, target)
    return calls
