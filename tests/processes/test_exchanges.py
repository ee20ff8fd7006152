"""The collectives of real processes do what the simulator does, bit by bit."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import exchanges
import pytest
import torch
from exchange_cases import Case, case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import ranks
from strategies import DTYPES, UNREDUCED, attrs, kinds, shapes, worlds
from transition_runs import addends, equal, read, run

from autopar.ir.dtensor import placements_of
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.messages import messages
from autopar.ir.record import DTYPES as DTYPES_BY_NAME
from autopar.ir.record import TensorType
from autopar.runtime.lowering.collectives import carried

MESHES = {
    2: [Mesh(dp=2), Mesh(dp=2, tp=1)],
    3: [Mesh(tp=3)],
    4: [Mesh(dp=2, tp=2), Mesh(tp=4), Mesh(dp=4), Mesh(tp=2, dp=2, ranks=[0, 2, 1, 3])],
}
# integers, bools and complex numbers, drawn more often
PARTIAL = [dtype for dtype in DTYPES_BY_NAME.values() if not dtype.is_floating_point]


def check(cases: list[Case]) -> None:
    if not cases:
        return
    found = ranks(len(cases[0][1])).run(exchanges.run_lowered, [given for given, _ in cases])
    for number, (given_, wanted) in enumerate(cases):
        for rank, expected in enumerate(wanted):
            ours = found[rank][number]
            if expected is None:  # a rank that holds nothing of it may return what it has sent
                continue
            assert equal(ours, expected) and ours.is_contiguous(), given_[0][rank]


@st.composite
def cases(draw: st.DrawFn, count: int, between: bool) -> Case:
    """On one mesh of ``count`` ranks, or between two of up to as many."""
    shape, dtype = draw(shapes()), draw(st.sampled_from([*DTYPES, *PARTIAL, *DTYPES_BY_NAME.values()]))
    here, there = draw(worlds(count, permuted=False)) if between else [draw(st.sampled_from(MESHES[count]))] * 2
    source = draw(attrs(here, shape, pending=() if dtype in UNREDUCED else kinds(dtype)))
    target = draw(attrs(there, shape, pending=()))
    elements = torch.arange(math.prod(shape)).reshape(shape)
    values = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=here.size, max_size=here.size)))
    global_ = (values.reshape(-1, *[1] * len(shape)) + elements) % 3  # exact in every dtype, whatever is reduced first
    global_ = global_ * here.size if "avg" in dict(source.pending).values() else global_
    return case(
        *(TensorType(shape, dtype, Layout(mesh, a)) for mesh, a in ((here, source), (there, target))),
        global_.to(dtype),
        Mesh(w=count) if between else None,
    )


@pytest.mark.parametrize("count", [2, 3, 4])
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_as_the_simulator(count: int, data: st.DataObject) -> None:
    check(data.draw(st.lists(cases(count, False), max_size=12)))


@pytest.mark.parametrize("count", [2, 3, 4])
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_between_stages_as_the_simulator(count: int, data: st.DataObject) -> None:
    check(data.draw(st.lists(cases(count, True), max_size=12)))


def test_a_divided_box_comes_together_from_two_senders() -> None:
    stages = {"s0": "a=2", "s1": "c=1 ranks 2"}
    source, target = (read(text, "w=4", **stages) for text in ("i32[(3 262145) 2] @s0", "i32[786435 2] @s1"))
    sent = messages(source.layout, target.layout, source.shape)
    assert [one.sender for one in sent] == [0, 1]
    check(
        [case(source, target, torch.arange(2 * 2 * 786435, dtype=torch.int32).reshape(2, 786435, 2) % 7919, Mesh(w=4))]
    )


TRANSITIONS = list(
    itertools.permutations(["[8/dp 4/tp]", "[8/tp 4/dp]", "[8/dp/tp 4]", "[8 4/tp]", "[8/dp 4]", "[8 4]"], 2)
)
TRANSITIONS += [
    ("[8 4] +dp", "[8/dp 4]"),
    ("[8 4] +dp +tp", "[8 4]"),
    ("[8/tp 4] +dp", "[8/dp 4]"),
    ("[8 4/tp] +dp", "[8 4]"),
    ("[8 4] +tp", "[8/dp 4/tp]"),
]


def test_dtensor_redistributes_to_the_same_pieces() -> None:
    mesh = Mesh(dp=2, tp=2)
    given_, ours = [], []
    for before, after in TRANSITIONS:
        source, target = (read(f"f32{text}", "dp=2 tp=2") for text in (before, after))
        _, pieces = addends(source, torch.randint(0, 8, (4, 8, 4)).float())
        found = run(source, target, dict(pieces))
        ours.append([found[rank] for rank in range(4)])
        before_, after_ = (placements_of(type.attr, mesh, type.shape) for type in (source, target))
        given_.append(([pieces[rank] for rank in range(4)], (8, 4), before_, after_))
    theirs = ranks(4).run(exchanges.redistributed_by_dtensor, given_, mesh)
    for number, pair in enumerate(TRANSITIONS):
        for rank in range(4):
            assert equal(ours[number][rank], theirs[rank][number]), (pair, rank)


SPLITS = [(0, 1), (1, 0), (0, 2), (2, 1), (1, 2)]


@pytest.mark.parametrize("shape", [(8, 4, 12), (5, 7, 3), (2, 1, 3), (4, 0, 8)], ids=str)
def test_every_collective_on_every_dim(shape: tuple[int, ...]) -> None:
    """Gathers, reduce-scatters and all-to-alls over four ranks, even, uneven and empty."""
    mesh = Mesh(tp=4)

    def split(dim: int | None = None, pending: tuple[str, ...] = ()) -> DistAttr:
        return DistAttr.split(*("tp" if d == dim else None for d in range(3)), pending=pending)

    wanted = [(split(d), split()) for d in range(3)] + [(split(pending=("tp",)), split(d)) for d in (0, 1, 2, None)]
    wanted += [(split(a), split(b)) for a, b in SPLITS]
    values = torch.randint(0, 8, (4, *shape))
    cases = [
        case(TensorType(shape, d, Layout(mesh, a)), TensorType(shape, d, Layout(mesh, b)), values.to(d))
        for a, b in wanted
        for d in (torch.float32, torch.bfloat16)
    ]
    check(cases)


TEXT = """program scheduled on dp=2 tp=2 at dp=0 tp=0
stream tp
stream dp
  x : f32[4 8] = input
  y : f32[8 4] = input
forward:
  a : f32[4 8] = relu(x)
  a_tp_start : f32[4 8] = start all_reduce(a, tp) on tp
  b : f32[8 8] = mm(y, a)
  a_tp : f32[4 8] = wait(a_tp_start)
  c : f32[4 8] = relu(a_tp)
  c_dp_start : f32[4 8] = start all_reduce(c, dp) on dp
  c_dp : f32[4 8] = wait(c_dp_start)
  d : f32[8 8] = mm(y, c_dp)
  return (b, d)
"""


def test_started_and_waited_for_where_the_text_says() -> None:
    """And in place where nobody reads the operand again: c is reduced in its own memory, a is read by mm."""
    text = ranks(4).run(exchanges.text_of_lowered, TEXT, 0)[0]
    ops = [
        line.split(" = ")[1].split("(")[0]
        for line in text.splitlines()
        if " = " in line and not line.lstrip().startswith("def")
    ]
    ops = [op.rpartition("_")[0] if op.startswith("autopar") and op[-1].isdigit() else op for op in ops]
    found = [
        op.replace("autopar_runtime_lowering_collectives_", "").replace("torch.ops.aten.", "")
        for op in ops
        if "(" not in op and ("autopar" in op or "aten" in op)
    ]
    assert found == [
        "relu.default",
        "start_all_reduce",
        "mm.default",
        "wait",
        "relu.default",
        "start_all_reduce_in_place",
        "wait",
        "mm.default",
    ], text


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_narrow_floats_are_reduced_in_wider_ones(dtype: torch.dtype) -> None:
    """Eight and seven halves are exact in them; 0.5 + 7.5 + 0.5 + 7.5 added two at a time is not."""
    source, target = (
        replace(read(f"f32[4{split}]{pending}", "tp=4"), dtype=dtype) for split, pending in (("", " +tp"), ("/tp", ""))
    )
    check([case(source, target, torch.tensor([[0.5] * 4, [1.5] * 4, [2.0] * 4, [4.0] * 4]).to(dtype))])


def test_an_average_stays_in_range_where_the_sum_does_not() -> None:
    source, target = read("f16[3] +avg:tp", "tp=4"), read("f16[3]", "tp=4")
    given_, wanted = case(source, target, torch.full((4, 3), 60000.0, dtype=torch.float16))
    assert all(torch.equal(piece, torch.full((3,), 60000.0, dtype=torch.float16)) for piece in wanted)
    check([(given_, wanted)])


def test_conjugate_views_are_carried_as_what_they_show() -> None:
    x = torch.complex(torch.ones(3), torch.arange(3.0)).conj()
    assert torch.equal(carried(x).resolve_conj(), x) and not carried(x).is_conj()
