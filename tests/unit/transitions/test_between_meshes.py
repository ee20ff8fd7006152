"""Transitions between two meshes: equal, of different shape, one in the other, disjoint, partly overlapping."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import UNREDUCED, attrs, holdings, kinds, meshes, shapes, worlds
from transition_runs import check, explicit_program, read

from autopar.errors import TransitionError
from autopar.ir import transfers
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.messages import messages
from autopar.ir.nodes import operands
from autopar.ir.program import Program
from autopar.ir.record import DTYPES, TensorType
from autopar.ir.transfers import Ends
from autopar.runtime.localize import localize, rank_classes
from autopar.runtime.lowering.packing import packing, size_of
from autopar.transitions import cost, transitions
from autopar.verify.channels import Group
from autopar.verify.channels.programs import tasks_of

WORLD = Mesh(w=6)
EVERY = list(DTYPES.values())


@st.composite
def pairs(draw: st.DrawFn, first: torch.dtype, second: torch.dtype) -> tuple[TensorType, TensorType, Mesh]:
    """Two placed types and the mesh of all ranks, which either may lie on itself."""
    here, there = draw(worlds())
    world = WORLD
    if draw(st.integers(0, 3)) == 0:
        world = draw(
            meshes(max_ranks=6).filter(lambda mesh: max(*here.ranks, *there.ranks) < mesh.size) | st.just(WORLD)
        )
        here, there = draw(st.sampled_from([(world, there), (here, world)]))
    shape = draw(shapes())
    before = () if first in UNREDUCED else tuple(kind for kind in kinds(first) if first == second or kind != "prod")
    source = draw(attrs(here, shape, pending=before))
    target = draw(attrs(there, shape, pending=kinds(second)))
    return TensorType(shape, first, Layout(here, source)), TensorType(shape, second, Layout(there, target)), world


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_rank_holds_its_piece(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(EVERY))
    source, target, world = data.draw(pairs(dtype, dtype))
    check(source, target, world=world)


@pytest.mark.simulated
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_casts_keep_the_value_and_stand_where_fewer_bytes_move(data: st.DataObject) -> None:
    two = st.tuples(st.sampled_from(EVERY), st.sampled_from(EVERY)).filter(
        lambda two: two[1].is_complex >= two[0].is_complex
    )
    source, target, world = data.draw(two.flatmap(lambda two: pairs(*two)))
    check(source, target, world=world)
    sent = next(step for step in transitions(source, target) if step.function is transfers.send)
    assert sent.type.dtype.itemsize == min(source.dtype.itemsize, target.dtype.itemsize)
    assert not sent.type.attr.pending


@pytest.mark.simulated
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_only_what_a_rank_lacks_is_sent_to_it(data: st.DataObject) -> None:
    """As the local programs have it, rank by rank; and the worst rank is what is paid for."""
    source, target, world = data.draw(pairs(torch.int32, torch.int32))
    source, target = (replace(t, layout=Layout(t.layout.mesh, t.attr.without_pending())) for t in (source, target))
    program = explicit_program(source, target, world)
    got = Counter[int]()
    for rank in world.ranks:
        for node in localize(program, world.coordinates(rank)).nodes:
            if node.target in (transfers.send, transfers.recv):
                given = transfers.arguments(node.target, node.args, node.kwargs)
                for receiver, places in packing(Ends.of(given, program.meshes), rank).sends:
                    got[receiver] += size_of(places)
    own, wanted = ({mesh.rank(at): set(numbers) for at, (_, numbers) in zip(mesh.points(),
        holdings(t.attr, t.shape, mesh), strict=True)}
                   for t in (source, target) for mesh in (t.layout.mesh,))  # fmt: skip
    lacks = {rank: len(need - own.get(rank, set())) for rank, need in wanted.items()}
    assert {rank: got[rank] for rank in lacks} == lacks
    assert sum(step.bytes for step in transitions(source, target)) == cost(source, target)
    if source.layout.mesh != target.layout.mesh:
        assert cost(source, target) == 4 * max(lacks.values())


@pytest.mark.simulated
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_both_ends_of_a_message_have_as_many_bytes(data: st.DataObject) -> None:
    """Backends do not compare them. Each rank plans its own end; what is checked before a run is what is sent."""
    source, target, world = data.draw(pairs(torch.int32, torch.int32))
    source, target = (replace(t, layout=Layout(t.layout.mesh, t.attr.without_pending())) for t in (source, target))
    program = explicit_program(source, target, world)
    sent, received = defaultdict[tuple[int, int], list[int]](list), defaultdict[tuple[int, int], list[int]](list)
    for rank in world.ranks:
        local = localize(program, world.coordinates(rank))
        checked = [group.tasks for group in tasks_of(local) if isinstance(group, Group)]
        for node in local.nodes:
            if node.target in (transfers.send, transfers.recv):
                given = transfers.arguments(node.target, node.args, node.kwargs)
                plan, tasks = packing(Ends.of(given, program.meshes), rank), checked.pop(0)
                for receiver, places in plan.sends:
                    sent[rank, receiver].append(4 * size_of(places))
                for sender, places in plan.receives:
                    received[sender, rank].append(4 * size_of(places))
                own = [4 * size_of((plan.sends if is_send else plan.receives)[k][1]) for is_send, k in plan.order]
                assert own == [task.bytes for task in tasks]
    assert sent == received


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("source", "target", "sent"),
    [
        ("i8[3 524289] @s0", "i8[3 524289] @s1", {0: 1, 1: 1, 2: 1, 3: 1}),
        ("i8[1048577/a] @s0", "i8[1048577] @s1", {0: 1, 1: 1, 2: 1, 3: 1}),
        ("i8[(3 349526/a)] @s0", "i8[1048578] @s1", {0: 1, 1: 1, 2: 1, 3: 1}),
        ("i8[(3 2621440/a)] @s0", "i8[(5/d 1572864)] @s2", {0: 1, 1: 2, 2: 1, 3: 1}),
        ("i8[1572867] @s0", "i8[1572867/d] @s2", {0: 1, 1: 1, 2: 1, 3: 1}),
        ("i8[524287] @s0", "i8[524287] @s1", {3: 1}),
    ],
)
def test_large_boxes_are_divided_among_replicas(source: str, target: str, sent: dict[int, int]) -> None:
    """As many messages of each rank; the parts are put together in the order of the value."""
    stages = {"s0": "a=2 b=2", "s1": "c=1 ranks 4", "s2": "d=2 ranks 4 5"}
    ends = [read(text, "w=6", **stages) for text in (source, target)]
    check(*ends, world=WORLD)
    assert Counter(one.sender for one in messages(ends[0].layout, ends[1].layout, ends[0].shape)) == sent


def test_a_rank_has_its_end_of_the_exchange() -> None:
    stages = {"s0": "dp=2", "s1": "tp=2 ranks 1 2"}
    source, target = (read(text, "w=4", **stages) for text in ("f32[6/dp 8] @s0", "bf16[6 8/tp] @s1"))
    program = explicit_program(source, target, Mesh(w=4))
    texts = [str(localize(program, {"w": rank})).partition("forward:\n")[2].splitlines() for rank in range(4)]
    ends = "splits=((), (tp,)), shape=(6, 8), source=((dp,), ()), home=s0)"
    cast = "  x_bfloat16 : bf16[3 8] = cast(x, bf16)"
    assert texts[0][:2] == [cast, f"  x_bfloat16_s1_s1 : bf16[3 8] = send(x_bfloat16, s1, {ends}"]
    assert texts[1][:2] == [cast, f"  x_bfloat16_s1_s1 : bf16[6 4] = recv(x_bfloat16, s1, {ends}"]
    assert texts[2][:1] == [f"  x_bfloat16_s1_s1 : bf16[6 4] = recv(None, s1, {ends}"]
    assert texts[3] == []
    assert rank_classes(program) == [[0], [1], [2], [3]]
    assert [step.bytes for step in transitions(source, target)] == [0, 0, 6 * 4 * 2]


def test_a_pending_value_is_reduced_before_it_is_sent_and_another_made_pending_after() -> None:
    stages = {"s0": "dp=2 tp=2", "s1": "dp=2 ranks 4 5"}
    source, target = (read(text, "w=6", **stages) for text in ("f32[6/dp 8] +max:tp @s0", "f32[6 8] +dp @s1"))
    check(source, target, world=WORLD)
    names = [step.function.__name__ for step in transitions(source, target)]
    assert names == ["reduce_scatter", "send", "recv", "pend"]


def test_a_value_passes_several_stages_and_comes_back() -> None:
    """A rank that lies on one stage of three runs what stands there alone."""
    text = """program explicit on w=4
stage s0 on dp=2
stage s1 on tp=2 ranks 2 3
  x : f32[4/dp 6] @s0 = input
forward:
  a : f32[4/dp 6] @s0 = relu(x)
  a_s : f32[4/dp 6] @s0 = send(a, s1)
  b : f32[4 6/tp] @s1 = recv(a_s, s1, splits=((), (tp,)))
  c : f32[4 6/tp] @s1 = relu(b)
  c_s : f32[4 6/tp] @s1 = send(c, s0)
  d : f32[4 6] @s0 = recv(c_s, s0, splits=((), ()))
  return d
"""
    program = Program.parse(text)
    program.verify()
    names = [[n.name for n in localize(program, {"w": rank}).nodes if n.op == "call_function"] for rank in range(4)]
    assert names == [["a", "b", "d"], ["a", "b", "d"], ["b", "c", "d"], ["b", "c", "d"]]
    kinds = [
        [
            n.target.__name__
            for n in localize(program, {"w": rank}).nodes
            if n.target in (transfers.send, transfers.recv)
        ]
        for rank in (0, 3)
    ]
    assert kinds == [["send", "recv"], ["recv", "send"]]
    assert not operands(localize(program, {"w": 3}).output)


def test_what_cannot_be_pending_is_refused_between_meshes_too() -> None:
    stages = {"s0": "dp=2", "s1": "dp=2 ranks 2 3"}
    for before, after, why in [
        (
            "i32[4] @s0",
            "i32[4] +avg:dp @s1",
            "an average of torch.int32 is no torch.int32; only floating point is averaged",
        ),
        ("c64[4] +max:dp @s0", "c64[4] @s1", "complex numbers have no max"),
    ]:
        message = f"no transfers lead from {before} to {after}: {why}"
        with pytest.raises(TransitionError, match=f"^{re.escape(message)}$"):
            transitions(*(read(text, "w=4", **stages) for text in (before, after)))


def test_another_kind_over_an_axis_of_the_same_name_elsewhere() -> None:
    """The axes of two meshes have nothing to do with each other."""
    stages = {"s0": "dp=2", "s1": "dp=2 ranks 2 3"}
    source, target = (read(text, "w=4", **stages) for text in ("f32[4] +max:dp @s0", "f32[4] +dp @s1"))
    check(source, target, world=Mesh(w=4))


def test_a_reduction_ends_in_splits_where_that_is_less() -> None:
    stages = {"s0": "dp=4", "s1": "x=4"}
    for after in ("f32[8 8/x] @s1", "f32[8 8] +x @s1"):
        source, target = (read(text, "w=4", **stages) for text in ("f32[8 8] +dp @s0", after))
        check(source, target, world=Mesh(w=4))
        assert [step.function.__name__ for step in transitions(source, target)][:1] == ["reduce_scatter"]
        assert cost(source, target) == 3 * 16 * 4
