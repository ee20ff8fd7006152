"""Verification: every promise has a program that breaks it, and the error says where, why, and what to do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import fx

from autopar.errors import VerifyError
from autopar.layout import DistAttr, Layout
from autopar.mesh import Mesh
from autopar.passes import Place, Reshard, run_passes
from autopar.passes.manager import Pass
from autopar.program import Program, record_of, set_record
from autopar.record import Requirement, Result, TensorType
from autopar.verify import verify

aten = torch.ops.aten

MLP = """\
program explicit on dp=4 tp=2
  x : f32[32/dp 64] = input
  up : f32[64 256/tp] = param
  down : f32[256/tp 64] = param
forward:
  mm : f32[32/dp 256/tp] = mm(x, up)
  relu : f32[32/dp 256/tp] = relu(mm)
  mm_1 : f32[32/dp 64] +tp = mm(relu, down)
  mm_1_tp : f32[32/dp 64] = all_reduce(mm_1, tp)
  return mm_1_tp
"""


def complaint(program: Program | str, made_by: str = "") -> str:
    program = Program.parse(program) if isinstance(program, str) else program
    with pytest.raises(VerifyError) as caught:
        verify(program, made_by)
    return str(caught.value)


def test_the_error_of_the_design() -> None:
    """Offending lines, the user's line, the rule, the remedy, against the pass that made it."""
    program = Program.parse("""\
program explicit on dp=4 tp=2
  x : f32[32/dp 64/tp] = input
  up : f32[64/tp 64] = param
forward:
  mm : f32[32/dp 64] +tp = mm(x, up)
  relu : f32[32/dp 64] = relu(mm)
  return relu
""")
    relu = program.node("relu")
    set_record(relu, replace(record_of(relu), source="model.py:41  self.act(self.up(x))"))
    assert complaint(program, "reshard") == """\
reshard left relu inconsistent
    mm : f32[32/dp 64] +tp = mm(x, up)
    relu : f32[32/dp 64] = relu(mm)          model.py:41  self.act(self.up(x))
  relu is not additive, so mm must be reduced over tp before it: insert all_reduce(mm, tp), or place mm differently"""
    assert complaint(program).startswith("this explicit program is inconsistent at relu\n    mm : ")


def edited(old: str, new: str, text: str = MLP) -> str:
    assert old in text
    return text.replace(old, new)


LOCAL = """\
program local on dp=2 tp=2 at dp=1 tp=0
  x : f32[2 4] = input
  p : (f32[2], f32[2]) = topk(x)
forward:
  y : f32[2 4] = relu(x)
"""
SCHEDULED = """\
program scheduled on dp=2 at dp=0
stream comm
  x : f32[2 4] = input
forward:
  x_dp : f32[2 4] = start all_reduce(x, dp) on comm
  y : f32[2 4] = relu(x)
  wait : f32[2 4] = wait(x_dp)
  return wait
"""
STATES = """\
program explicit on dp=2
  a : f32[4/dp] = state(c)
  b : f32[4] = state(d)
  x : f32[4] = input
update:
  c : f32[4/dp] = relu(a)
  d : f32[4] = relu(b)
  return x
  grad x = b
"""
PLACED = "program placed on dp=2 tp=2\nstage s on dp=2 ranks 2 3\n  x : f32[4 6] = input\nforward:\n  p : (f32[4 6], i64[4 6]) = topk(x, 6)\n"

# text → the exact error
BROKEN: dict[str, tuple[str, str]] = {
    "no mesh": (
        "program explicit\n",
        "this explicit program is inconsistent\n  a explicit program lies on a mesh; the header names none",
    ),
    "local without coordinates": (
        "program local on dp=2\n",
        "this local program is inconsistent\n  local and scheduled programs, and no others, have the coordinates of one rank",
    ),
    "coordinates of an explicit program": (
        "program explicit on dp=2 at dp=0\n",
        "this explicit program is inconsistent\n  local and scheduled programs, and no others, have the coordinates of one rank",
    ),
    "coordinates outside the mesh": (
        "program local on dp=2 at dp=2\n",
        "this local program is inconsistent\n  coordinate dp=2 lies outside the mesh (dp=2)",
    ),
    "coordinates of other axes": (
        "program local on dp=2 tp=2 at dp=0\n",
        "this local program is inconsistent\n  the coordinates need one index for each axis of the mesh (dp=2 tp=2)",
    ),
    "a value without type": (
        "program traced\n  x : None = input\n",
        "this traced program is inconsistent at x\n    x : None = input\n  every value has a type",
    ),
    "an element of another type": (
        PLACED + "  y : i64[4 6] = p[0]\n",
        "this placed program is inconsistent at y\n    p : (f32[4 6], i64[4 6]) = topk(x, 6)\n    y : i64[4 6] = p[0]\n  element 0 is f32[4 6]",
    ),
    "a transfer before reshard": (
        PLACED + "  x_dp : f32[4/dp 6] = slice(x, 0, dp)\n",
        "this placed program is inconsistent at x_dp\n    x_dp : f32[4/dp 6] = slice(x, 0, dp)\n  a placed program has no transfers; reshard inserts them",
    ),
    "a transfer before place": (
        "program traced\n  x : f32[4] = input\nforward:\n  y : bf16[4] = cast(x, bf16)\n",
        "this traced program is inconsistent at y\n    y : bf16[4] = cast(x, bf16)\n  a traced program has no transfers; reshard inserts them",
    ),
    "undecided": (
        "program placed on dp=2\n  x : f32[4/?] = input\n",
        "this placed program is inconsistent at x\n    x : f32[4/?] = input\n  a dim is left undecided ('?'): place decides it",
    ),
    "an axis twice": (
        "program placed on dp=2\n  x : f32[4/dp 4/dp] = input\n",
        "this placed program is inconsistent at x\n    x : f32[4/dp 4/dp] = input\n  the axis dp is used twice on one value; each axis splits it, or is pending, once",
    ),
    "kinds of pending that do not commute": (
        "program placed on dp=2 tp=2\n  x : f32[4 4] +dp +max:tp = input\n",
        "this placed program is inconsistent at x\n    x : f32[4 4] +dp +max:tp = input\n"
        "  pending sum over dp and max over tp at once: the order of the reductions would matter; reduce one first",
    ),
    "a required axis twice": (
        PLACED + "  y : f32[4 6] = relu(x as [4/dp 6] +dp)\n",
        "this placed program is inconsistent at y\n    y : f32[4 6] = relu(x as [4/dp 6] +dp)\n  the axis dp is used twice on one value; each axis splits it, or is pending, once",
    ),
    "a result that does not follow": (
        edited("relu : f32[32/dp 256/tp] =", "relu : f32[32 256/tp] ="),
        "this explicit program is inconsistent at relu\n    mm : f32[32/dp 256/tp] = mm(x, up)\n    relu : f32[32 256/tp] = relu(mm)\n"
        "  relu splits the factor ...1 (... -> ...) over dp in one place and over no axis in the result: place them alike",
    ),
    "a result that is not marked pending": (
        edited("mm_1 : f32[32/dp 64] +tp", "mm_1 : f32[32/dp 64]"),
        "this explicit program is inconsistent at mm_1\n    relu : f32[32/dp 256/tp] = relu(mm)\n    down : f32[256/tp 64] = param\n    mm_1 : f32[32/dp 64] = mm(relu, down)\n"
        "  the result of mm (m k, k n -> m n) is pending sum over tp, not reduced",
    ),
    "a transfer that does not apply": (
        edited("all_reduce(mm_1, tp)", "all_reduce(relu, tp)").replace("mm_1_tp : f32[32/dp 64]", "mm_1_tp : f32[32/dp 256]"),
        "this explicit program is inconsistent at mm_1_tp\n    relu : f32[32/dp 256/tp] = relu(mm)\n    mm_1_tp : f32[32/dp 256] = all_reduce(relu, tp)\n"
        "  the value is not pending sum over tp",
    ),
    "a transfer of another type": (
        edited("mm_1_tp : f32[32/dp 64]", "mm_1_tp : f32[32 64]"),
        "this explicit program is inconsistent at mm_1_tp\n    mm_1 : f32[32/dp 64] +tp = mm(relu, down)\n    mm_1_tp : f32[32 64] = all_reduce(mm_1, tp)\n"
        "  all_reduce makes it f32[32/dp 64]",
    ),
    "a use that disagrees": (
        edited("mm(relu, down)", "mm(relu as [32 256/tp], down)").replace("mm_1 : f32[32/dp 64]", "mm_1 : f32[32 64]"),
        "this explicit program is inconsistent at mm_1\n    relu : f32[32/dp 256/tp] = relu(mm)\n    mm_1 : f32[32 64] +tp = mm(relu as [32 256/tp], down)\n"
        "  mm_1 needs relu as [32 256/tp], but it is f32[32/dp 256/tp]: insert the transfers between them",
    ),
    "another dtype": (
        edited("relu(mm)", "relu(mm as bf16[32/dp 256/tp])"),
        "this explicit program is inconsistent at relu\n    mm : f32[32/dp 256/tp] = mm(x, up)\n    relu : f32[32/dp 256/tp] = relu(mm as bf16[32/dp 256/tp])\n"
        "  relu needs mm as bf16[32/dp 256/tp], but it is f32[32/dp 256/tp]: insert the transfers between them",
    ),
    "a result that disagrees": (
        edited("return mm_1_tp", "return mm_1_tp as [32 64]"),
        "this explicit program is inconsistent at output\n    mm_1_tp : f32[32/dp 64] = all_reduce(mm_1, tp)\n"
        "  the output needs mm_1_tp as [32 64], but it is f32[32/dp 64]: insert the transfers between them",
    ),
    "two meshes": (
        PLACED + "  y : f32[4 6] @s = relu(x)\n",
        "this placed program is inconsistent at y\n    x : f32[4 6] = input\n    y : f32[4 6] @s = relu(x)\n  operands and results lie on different meshes; an op runs on one: insert a send and a recv",
    ),
    "streams before they are scheduled": (
        "program local on dp=2 at dp=0\n  x : f32[2] = input\nforward:\n  x_dp : f32[2] = start all_reduce(x, dp)\n",
        "this local program is inconsistent at x_dp\n    x_dp : f32[2] = start all_reduce(x, dp)\n  a local program has no streams; only a scheduled one starts and waits",
    ),
    "waiting before it is scheduled": (
        "program local on dp=2 at dp=0\n  x : f32[2] = input\nforward:\n  y : f32[2] = wait(x)\n",
        "this local program is inconsistent at y\n    y : f32[2] = wait(x)\n  a local program has no streams; only a scheduled one starts and waits",
    ),
    "a stream before it is scheduled": (
        "program traced\n  x : f32[2] = input on comm\n",
        "this traced program is inconsistent at x\n    x : f32[2] = input on comm\n  a traced program has no streams; only a scheduled one starts and waits",
    ),
    "no such axis at the level local": (
        LOCAL + "  z : f32[2 4] = all_reduce(x, pp)\n",
        "this local program is inconsistent at z\n    z : f32[2 4] = all_reduce(x, pp)\n  the mesh (dp=2 tp=2) has no axis 'pp'; its axes are dp, tp; did you mean 'tp'?",
    ),
    "too many pieces": (
        LOCAL + "  z : f32[2 2] = slice(x, 1, tp, sizes=[2, 1, 1])\n",
        "this local program is inconsistent at z\n    z : f32[2 2] = slice(x, 1, tp, sizes=[2, 1, 1])\n  sizes lists 3 pieces, the axis tp has 2",
    ),
    "too few new pieces": (
        LOCAL + "  z : f32[4 2] = all_to_all(x, 0, 1, dp, sizes=[2, 2], new_sizes=[2])\n",
        "this local program is inconsistent at z\n    z : f32[4 2] = all_to_all(x, 0, 1, dp, sizes=[2, 2], new_sizes=[2])\n  new_sizes lists 1 pieces, the axis dp has 2",
    ),
    "no pieces": (
        LOCAL + "  z : f32[2 2] = slice(x, 1, tp)\n",
        "this local program is inconsistent at z\n    x : f32[2 4] = input\n    z : f32[2 2] = slice(x, 1, tp)\n  at the level local an argument sizes lists the pieces",
    ),
    "no new pieces": (
        LOCAL + "  z : f32[4 2] = all_to_all(x, 0, 1, dp, sizes=[2, 2])\n",
        "this local program is inconsistent at z\n    x : f32[2 4] = input\n    z : f32[4 2] = all_to_all(x, 0, 1, dp, sizes=[2, 2])\n  at the level local an argument new_sizes lists the pieces",
    ),
    "pieces of another result": (
        LOCAL + "  z : f32[2 3] = slice(x, 1, tp, sizes=[2, 2])\n",
        "this local program is inconsistent at z\n    x : f32[2 4] = input\n    z : f32[2 3] = slice(x, 1, tp, sizes=[2, 2])\n  its pieces make it [2, 2]",
    ),
    "another shape without pieces": (
        LOCAL + "  z : f32[2 3] = all_reduce(x, tp)\n",
        "this local program is inconsistent at z\n    x : f32[2 4] = input\n    z : f32[2 3] = all_reduce(x, tp)\n  its pieces make it [2, 4]",
    ),
    "pieces of another operand: slice": (
        LOCAL + "  z : f32[2 3] = slice(x, 1, tp, sizes=[3, 2])\n",
        "this local program is inconsistent at z\n    x : f32[2 4] = input\n    z : f32[2 3] = slice(x, 1, tp, sizes=[3, 2])\n  its pieces fit an operand with 5 in dim 1, x has 4",
    ),
    "pieces of another operand: gather": (
        LOCAL + "  z : f32[5 4] = all_gather(x, 0, dp, sizes=[2, 3])\n",
        "this local program is inconsistent at z\n    x : f32[2 4] = input\n    z : f32[5 4] = all_gather(x, 0, dp, sizes=[2, 3])\n  its pieces fit an operand with 3 in dim 0, x has 2",
    ),
    "pieces of another operand: all-to-all, the dim that is joined": (
        LOCAL + "  z : f32[5 2] = all_to_all(x, 0, 1, dp, sizes=[2, 3], new_sizes=[2, 2])\n",
        "this local program is inconsistent at z\n    x : f32[2 4] = input\n    z : f32[5 2] = all_to_all(x, 0, 1, dp, sizes=[2, 3], new_sizes=[2, 2])\n"
        "  its pieces fit an operand with 3 in dim 0, x has 2",
    ),
    "pieces of another operand: all-to-all, the dim that is split": (
        LOCAL + "  z : f32[4 2] = all_to_all(x, 0, 1, dp, sizes=[2, 2], new_sizes=[3, 2])\n",
        "this local program is inconsistent at z\n    x : f32[2 4] = input\n    z : f32[4 2] = all_to_all(x, 0, 1, dp, sizes=[2, 2], new_sizes=[3, 2])\n"
        "  its pieces fit an operand with 5 in dim 1, x has 4",
    ),
    "pieces of no dim": (
        LOCAL + "  z : f32[2 4] = slice(x, 2, tp, sizes=[1, 1])\n",
        "this local program is inconsistent at z\n    x : f32[2 4] = input\n    z : f32[2 4] = slice(x, 2, tp, sizes=[1, 1])\n  there is no dim 2 in a value of 2",
    ),
    "a transfer to several tensors": (
        LOCAL + "  z : (f32[2 4], f32[2 4]) = all_reduce(x, tp)\n",
        "this local program is inconsistent at z\n    x : f32[2 4] = input\n    z : (f32[2 4], f32[2 4]) = all_reduce(x, tp)\n  all_reduce takes one tensor and makes one",
    ),
    "no such stream": (
        edited("on comm", "on compute", SCHEDULED),
        "this scheduled program is inconsistent at x_dp\n    x_dp : f32[2 4] = start all_reduce(x, dp) on compute\n  no stream 'compute'; streams are comm",
    ),
    "no streams": (
        edited("stream comm\n", "", SCHEDULED),
        "this scheduled program is inconsistent at x_dp\n    x_dp : f32[2 4] = start all_reduce(x, dp) on comm\n  no stream 'comm'; streams are none",
    ),
    "starting what is no collective": (
        edited("relu(x)", "start relu(x)", SCHEDULED),
        "this scheduled program is inconsistent at y\n    y : f32[2 4] = start relu(x)\n  only a collective can be started and waited for",
    ),
    "reading what is only started": (
        edited("relu(x)", "relu(x_dp)", SCHEDULED),
        "this scheduled program is inconsistent at y\n    x_dp : f32[2 4] = start all_reduce(x, dp) on comm\n    y : f32[2 4] = relu(x_dp)\n  x_dp is only started here: read wait(x_dp)",
    ),
    "returning what is only started": (
        edited("return wait", "return x_dp", SCHEDULED),
        "this scheduled program is inconsistent at output\n    x_dp : f32[2 4] = start all_reduce(x, dp) on comm\n  x_dp is only started here: read wait(x_dp)",
    ),
    "waiting for what is not started": (
        edited("wait(x_dp)", "wait(y)", SCHEDULED),
        "this scheduled program is inconsistent at wait\n    y : f32[2 4] = relu(x)\n    wait : f32[2 4] = wait(y)\n  y is not started: read it without waiting",
    ),
    "never waiting": (
        edited("  wait : f32[2 4] = wait(x_dp)\n  return wait\n", "", SCHEDULED),
        "this scheduled program is inconsistent at x_dp\n    x_dp : f32[2 4] = start all_reduce(x, dp) on comm\n  x_dp is started and never waited for: insert wait(x_dp)",
    ),
    "a gradient of another shape": (
        edited("x : f32[4] =", "x : f32[5] =", STATES),
        "this explicit program is inconsistent at output\n    x : f32[5] = input\n    b : f32[4] = state(d)\n  b is the grad of x and has another shape",
    ),
    "a state of another shape": (
        edited("b : f32[4] = state(d)", "b : f32[5] = state(d)", STATES).replace("  d : f32[4] = relu(b)", "  d : f32[4] = relu(x)").replace("grad x = b", "grad x = x"),
        "this explicit program is inconsistent at output\n    b : f32[5] = state(d)\n    d : f32[4] = relu(x)\n  d is the state of b and has another shape",
    ),
    "a state that lies elsewhere afterwards": (
        edited("a : f32[4/dp] = state(c)", "a : f32[4/dp] = state(d)", STATES),
        "this explicit program is inconsistent at output\n    a : f32[4/dp] = state(d)\n    d : f32[4] = relu(b)\n  a and what replaces it lie alike: require d as f32[4/dp]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_what_breaks_a_promise_is_reported(what: str) -> None:
    text, message = BROKEN[what]
    assert complaint(text) == message


@pytest.mark.parametrize("text", [MLP, SCHEDULED, STATES, LOCAL], ids=["explicit", "scheduled", "states", "local"])
def test_what_keeps_its_promises_is_not(text: str) -> None:
    verify(Program.parse(text))


def test_an_op_without_rule() -> None:
    told = complaint(PLACED + "  y : f32[4 6] = _fft_c2c(x, [0], 0, True)\n")
    assert told.startswith("this placed program is inconsistent at y\n    x : f32[4 6] = input\n    y : f32[4 6] = _fft_c2c(x, [0], 0, True)\n  no sharding rule for _fft_c2c")
    assert "autopar.register_rule" in told


def test_every_pass_is_named() -> None:
    assert complaint("program explicit\n", "reshard").startswith("reshard left the program inconsistent\n")
    assert complaint(BROKEN["no such stream"][0], "schedule").startswith("schedule left x_dp inconsistent\n    x_dp : ")


# -- what the text cannot say ------------------------------------------------------------------------------------


def mlp() -> Program:
    return Program.parse(MLP)


def change(program: Program, name: str, **fields: object) -> Program:
    node = program.node(name)
    set_record(node, replace(record_of(node), **fields))
    return program


def test_a_node_without_record() -> None:
    program = mlp()
    with program.graph.inserting_before(program.node("relu")):
        program.graph.call_function(aten.neg.default, (program.node("mm"),))
    assert complaint(program, "fuse") == "fuse left neg_default inconsistent\n  every node has a record; this one was made without program.edit()"


def test_a_value_that_is_read_before_it_is_made() -> None:
    program = mlp()
    program.node("mm").append(program.node("mm_1"))
    assert complaint(program) == "this explicit program is inconsistent at mm_1\n    mm_1 : f32[32/dp 64] +tp = mm(relu, down)\n  relu is read before it is made"


def test_a_name_that_is_given_twice() -> None:
    program = mlp()
    program.node("relu").name = "mm"
    assert complaint(program).endswith("\n    mm : f32[32/dp 256/tp] = relu(mm)\n  the name mm is given twice")


def test_phases_and_roles() -> None:
    assert complaint(change(mlp(), "relu", phase="middle")).endswith("  no phase 'middle'; phases are forward, backward, update")
    assert complaint(change(mlp(), "x", role="weight")).endswith("    x : f32[32/dp 64] = weight\n  no role 'weight'; roles are input, param, buffer, tangent, state")


def test_results_that_are_not_told() -> None:
    program = change(mlp(), "output", results=())
    assert complaint(program) == "this explicit program is inconsistent at output\n  1 results, but the record tells what 0 of them are"
    program = mlp()
    program.tree = ("", ", ", "")
    assert complaint(program).endswith("  1 values are returned, but the tree has places for 2")
    program.tree = ()
    assert complaint(program).endswith("  1 values are returned, but the tree has places for 0")
    program = change(mlp(), "output", results=(Result("grad", "up"),))
    program.tree = ()
    assert complaint(program).endswith("  mm_1_tp is the grad of up and has another shape")
    change(program, "output", results=(Result("grad", "upper"),))
    assert complaint(program).endswith("  there is no placeholder upper to have mm_1_tp as its grad")


def test_results_have_one_order() -> None:
    program = Program.parse(STATES)
    results = record_of(program.output).results
    assert [result.kind for result in results] == ["return", "grad", "state", "state"]
    told = "  each state is replaced once, in the order of the placeholders: a, b"
    assert complaint(change(program, "output", results=(*results[:2], results[3], results[2]))).endswith(told)
    assert complaint(change(program, "output", results=(*results[:2], results[2], results[2]))).endswith(told)
    assert complaint(change(program, "output", results=(results[1], results[0], *results[2:]))).endswith(
        "  results are what is returned, then gradients, then states"
    )
    program = Program.parse(STATES.replace("state(c)", "input"))
    change(program, "output", results=(*record_of(program.output).results[:2], Result("state", "x")))
    program.output.args = (program.output.args[0][:3],)
    assert complaint(program).endswith("  each state is replaced once, in the order of the placeholders: b")
    program = Program.parse("program traced\n  a : f32[2] = state(a)\n")
    change(program, "output", results=())
    program.output.args = ((),)
    assert complaint(program).endswith("  each state is replaced once, in the order of the placeholders: a")
    assert "a : f32[2] = state(?)" in str(program)


def test_elements_that_are_not_there() -> None:
    program = Program.parse(PLACED + "  y : f32[4 6] = p[0]\n")
    program.node("y").args = (program.node("p"), 2)
    assert complaint(program).endswith("    y : f32[4 6] = p[2]\n  p has no element 2")
    program.node("y").args = (program.node("x"), 0)
    assert complaint(program).endswith("    y : f32[4 6] = x[0]\n  x has no element 0")


def test_layouts_that_are_none() -> None:
    whole = record_of(mlp().node("x")).type
    assert complaint(change(mlp(), "x", type=replace(whole, layout=None))).endswith(
        "    x : f32[32 64] = input\n  at the level explicit every value has a Layout"
    )
    for attr, why in (
        (DistAttr.split("dp"), "    mm does not print\n  the Layout has 1 dims, the value 2"),
        (DistAttr.split("dp", "ep"), "the mesh (dp=4 tp=2) has no axis 'ep'; its axes are dp, tp; did you mean 'tp'?"),
        (DistAttr((((4, ("dp",)), (8, ())), ((None, ()),))), "the Layout is not in its normal form; make it with DistAttr.normalize"),
    ):
        program = mlp()
        change(program, "mm", uses=(Requirement(Layout(program.mesh, attr), torch.float32), None))
        assert complaint(program).endswith(why)
    other = Layout(Mesh(dp=4, tp=2, name="s"), DistAttr.split("dp", None))
    assert complaint(change(mlp(), "x", type=replace(whole, layout=other))).endswith(
        "  the mesh (Mesh(dp=4, tp=2, name='s')) is neither the program's nor one of its stages"
    )


def test_every_use_has_a_requirement() -> None:
    assert complaint(change(mlp(), "mm", uses=())).endswith("  2 operands, but 0 requirements: every use has one")
    program = mlp()
    need = record_of(program.node("mm")).uses[0]
    assert complaint(change(program, "mm", uses=(need, None))).endswith("    up : f32[64 256/tp] = param\n    mm : f32[32/dp 256/tp] = mm(x, up)\n  the use of up has no requirement")
    assert complaint(change(mlp(), "output", uses=())).endswith("  1 operands, but 0 requirements: every use has one")


def test_local_programs_have_no_layouts() -> None:
    program = Program.parse(LOCAL)
    layout = Layout(program.mesh, DistAttr.replicated(2))
    why = "  a local program has the sizes of one rank and no Layouts"
    assert complaint(change(program, "y", type=TensorType((2, 4), torch.float32, layout))).endswith(why)
    assert complaint(change(Program.parse(LOCAL), "y", uses=(None,))).endswith(why)


def test_transfers_take_one_tensor() -> None:
    local = Program.parse(LOCAL + "  z : f32[2 4] = all_reduce(x, tp)\n")
    local.node("z").args = (local.node("p"), "tp")
    assert complaint(local).endswith("    z : f32[2 4] = all_reduce(p, tp)\n  all_reduce takes one tensor and makes one")
    explicit = Program.parse(PLACED.replace("placed", "explicit") + "  z : f32[4/dp 6] = slice(x, 0, dp)\n")
    explicit.node("z").args = (explicit.node("p"), 0, "dp")
    assert complaint(explicit).endswith("    z : f32[4/dp 6] = slice(p, 0, dp)\n  slice takes one tensor and makes one")


# -- wrong passes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forgetful(Reshard):
    """Drops what it inserted last."""

    name: ClassVar[str] = "forgetful"

    def run(self, program: Program) -> None:
        super().run(program)
        last: fx.Node = [node for node in program.nodes if node.target.__class__.__name__ == "function"][-1]
        with program.edit() as edit:
            edit.replace_all_uses(last, last.args[0])
            edit.erase(last)


@dataclass(frozen=True)
class Careless(Pass):
    """Splits a value and tells nobody."""

    name: ClassVar[str] = "careless"
    takes: ClassVar[str] = "explicit"
    gives: ClassVar[str] = "explicit"

    def run(self, program: Program) -> None:
        assert program.mesh is not None
        with program.edit() as edit:
            node = program.node("relu")
            edit.annotate(node, type=TensorType((32, 256), torch.float32, Layout(program.mesh, DistAttr.split("tp", "dp"))))


TRACED = """\
program traced on dp=4 tp=2
  x : f32[32/dp 64] = input
  up : f32[64 256/tp] = param
  down : f32[256/tp 64] = param
forward:
  mm : f32[32 256] = mm(x, up)
  relu : f32[32 256] = relu(mm)
  mm_1 : f32[32 64] = mm(relu, down)
  gelu : f32[32 64] = gelu(mm_1)
  return gelu
"""


def test_a_pass_that_drops_a_transfer_is_blamed() -> None:
    program = Program.parse(TRACED)
    with pytest.raises(VerifyError) as caught:
        run_passes(program, [Place(), Forgetful()])
    assert str(caught.value) == """\
forgetful left gelu inconsistent
    mm_1 : f32[32/dp 64] +tp = mm(relu, down)
    gelu : f32[32/dp 64] = gelu(mm_1 as [32/dp 64])
  gelu needs mm_1 as [32/dp 64], but it is f32[32/dp 64] +tp: insert the transfers between them"""


def test_a_pass_that_lays_a_value_wrongly_is_blamed() -> None:
    program = Program.parse(TRACED)
    with pytest.raises(VerifyError) as caught:
        run_passes(program, [Place(), Reshard(), Careless()])
    assert str(caught.value) == """\
careless left relu inconsistent
    mm : f32[32/dp 256/tp] = mm(x, up)
    relu : f32[32/tp 256/dp] = relu(mm)
  relu splits the factor ...1 (... -> ...) over dp in one place and over tp in the result: place them alike"""


def test_right_passes_are_not() -> None:
    program = Program.parse(TRACED)
    assert [report.name for report in run_passes(program, [Place(), Reshard()])] == ["place", "reshard"]
    with pytest.raises(ValueError, match="the pass place takes a traced program, this one is explicit"):
        run_passes(program, [Place()])
