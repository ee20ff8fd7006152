"""Verification: broken promises that the text cannot say, made by changing records and nodes."""

from __future__ import annotations

from dataclasses import replace

import torch
from verified_programs import LOCAL, MLP, PLACED, STATES, complaint

from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import record_of, set_record
from autopar.ir.program import Program
from autopar.ir.record import Requirement, Result, TensorType

aten = torch.ops.aten


def mlp() -> Program:
    return Program.parse(MLP)


def change(program: Program, name: str, **fields: object) -> Program:
    node = program.node(name)
    set_record(node, record_of(node)._replace(**fields))
    return program


def test_a_node_without_record() -> None:
    program = mlp()
    with program.graph.inserting_before(program.node("relu")):
        program.graph.call_function(aten.neg.default, (program.node("mm"),))
    assert (
        complaint(program, "fuse")
        == "fuse left neg_default inconsistent\n  every node has a record; this one was made without program.edit()"
    )


def test_a_value_that_is_read_before_it_is_made() -> None:
    program = mlp()
    program.node("mm").append(program.node("mm_1"))
    assert (
        complaint(program)
        == "this explicit program is inconsistent at mm_1\n    mm_1 : f32[32/dp 64] +tp = mm(relu, down)\n  relu is "
        "read before it is made"
    )


def test_a_name_that_is_given_twice() -> None:
    program = mlp()
    program.node("relu").name = "mm"
    assert complaint(program).endswith("\n    mm : f32[32/dp 256/tp] = relu(mm)\n  the name mm is given twice")


def test_phases_and_roles() -> None:
    assert complaint(change(mlp(), "relu", phase="middle")).endswith(
        "  no phase 'middle'; phases are finish, forward, backward, weight_gradients, update"
    )
    assert complaint(change(mlp(), "x", role="weight")).endswith(
        "    x : f32[32/dp 64] = weight\n  no role 'weight'; roles are input, param, buffer, tangent, seed, state"
    )


def test_results_that_are_not_told() -> None:
    program = change(mlp(), "output", results=())
    assert (
        complaint(program)
        == "this explicit program is inconsistent at output\n  1 results, but the record describes 0 of them"
    )
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
        "  results are in the order: returned values, gradients, states"
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
        (
            DistAttr((((4, ("dp",)), (8, ())), ((None, ()),))),
            "the Layout is not in its normal form; make it with DistAttr.normalize",
        ),
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
    assert complaint(change(program, "mm", uses=(need, None))).endswith(
        "    up : f32[64 256/tp] = param\n    mm : f32[32/dp 256/tp] = mm(x, up)\n  the use of up has no requirement"
    )
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
    assert complaint(local).endswith(
        "    z : f32[2 4] = all_reduce(p, tp)\n  all_reduce takes one tensor and makes one"
    )
    explicit = Program.parse(PLACED.replace("placed", "explicit") + "  z : f32[4/dp 6] = slice(x, 0, dp)\n")
    explicit.node("z").args = (explicit.node("p"), 0, "dp")
    assert complaint(explicit).endswith("    z : f32[4/dp 6] = slice(p, 0, dp)\n  slice takes one tensor and makes one")


def test_an_exchange_does_not_convert() -> None:
    """Otherwise a rank would send fewer bytes than another waits for, which no backend notices."""
    said = "{} does not convert: its operand and its result have one dtype"
    for name, text in EXCHANGES.items():
        program = Program.parse(text)
        program.verify()
        node = program.node("y")
        type = record_of(node).type
        assert isinstance(type, TensorType)
        assert said.format(name) in complaint(change(program, "y", type=replace(type, dtype=torch.float16)))


EXCHANGES = {
    "redistribute": """\
program local on dp=2 at dp=0
  x : f32[2 4] = input
forward:
  y : f32[4 2] = redistribute(x, splits=((), (dp,)), axis=(dp,), shape=(4, 4), source=((dp,), ()))
  return y
""",
    "send": """\
program local on w=2 at w=0
stage a on s=1
stage b on t=1 ranks 1
  x : f32[4] = input
forward:
  y : f32[4] = send(x, b, splits=((),), shape=(4,), source=((),), home=a)
  return
""",
}
