"""Edits: what a commit does to the program, what it counts, and the names and types it gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import models
import pytest
import torch
from edited_program import TEXT, base, layout, lines

from autopar.capture import capture
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import record_of
from autopar.ir.program import Program
from autopar.ir.record import Requirement, TensorType
from autopar.passes import Place, Reshard, Share, run_passes

aten = torch.ops.aten


# -- commits and counts ------------------------------------------------------------------------------------------


def test_a_batch_of_edits_is_committed_once() -> None:
    program = base()
    node = program.node
    with program.edit() as edit:
        for user in ("mul", "neg"):
            whole = edit.all_gather(node("x"), 0, "dp", before=node(user))
            split = edit.slice(whole, 1, "tp", before=node(user))
            edit.insert(aten.relu.default, (split,), before=node(user), type=split.type)
        edit.annotate(node("neg"), phase="update")
        assert len(program.graph.nodes) == 14  # nothing has been touched
        assert str(program) == TEXT
    counts = program.counts
    assert (counts.commits, counts.inserted, counts.removed, counts.record_updates, counts.node_visits) == (
        1,
        6,
        0,
        1,
        20,
    )


def test_an_edit_without_operations_commits_nothing() -> None:
    program = base()
    for sync in (False, True):
        with program.edit(sync=sync) as edit:
            edit.commit()
            edit.annotate(program.node("neg"), phase="backward", type=record_of(program.node("neg")).type)
    assert program.counts.commits == program.counts.node_visits == program.counts.record_updates == 0


def test_erased_nodes_are_counted_and_gone() -> None:
    program = base()
    neg, mm, ln = map(program.node, ("neg", "mm", "ln"))
    with program.edit() as edit:
        edit.erase(mm)
        edit.erase(neg)
        edit.erase(neg)
        edit.replace_all_uses(neg, ln.args[0])
        edit.erase(edit.pend(ln.args[0], "tp", before=mm))
        assert "neg" in str(program)
    assert program.counts.removed == 3 and program.counts.inserted == 1 and program.counts.commits == 1
    assert "neg" not in str(program) and "mm" not in str(program) and "pend" not in str(program)
    assert "return (add as [8/dp 4/tp], mul, x_dp_tp)" in str(program)
    assert Program.parse(str(program)) == program


def place() -> Place:
    return Place(
        Mesh(dp=2, tp=2),
        {
            "x": DistAttr.split("dp", None),
            "up_weight": DistAttr.split("tp", None),
            "down_weight": DistAttr.split(None, "tp"),
        },
    )


def test_each_pass_commits_once_if_it_edits() -> None:
    program = capture(models.Block(), (torch.randn(6, 8),), {}).program
    for step in (place(), Reshard()):
        before = program.counts.commits, program.counts.node_visits
        step.run(program)
        program.level = step.gives
        assert program.counts.commits - before[0] == 1, step.name
        assert program.counts.node_visits - before[1] == len(program.graph.nodes), step.name
    twice = program.copy()
    user = next(node for node in twice.nodes if node.target is aten.gelu.default)
    with twice.edit() as edit:
        for _ in range(2):
            edit.pend(twice.node("down_bias"), "tp", before=user)
    Share().run(twice)
    assert twice.counts.commits == 2
    Share().run(twice)
    assert twice.counts.commits == 2  # nothing left to share


@pytest.mark.parametrize("step", [Place(Mesh(dp=2)), Reshard(), Share()], ids=lambda step: step.name)
def test_a_pass_with_nothing_to_do_commits_nothing(step: Any) -> None:
    """Reshard where all uses agree, Share without twins, Place where there is nothing to place."""
    agreeing = "  x : f32[4/dp] = input\nforward:\n  y : f32[4/dp] = relu(x)\n  return y\n"
    program = Program.parse(f"program {step.takes} on dp=2\n{'' if step.takes == 'traced' else agreeing}")
    run_passes(program, [step])
    assert program.counts.commits == 0


# -- what a commit does ------------------------------------------------------------------------------------------


def test_names_are_given_in_graph_order() -> None:
    program = base()
    node = program.node
    with program.edit() as edit:
        last = edit.all_gather(node("x"), 0, "dp", before=program.output)
        first = edit.all_gather(node("x"), 0, "dp", before=node("relu"))
        middle = edit.all_gather(node("x"), 0, "dp", before=node("mm"))
        chained = edit.slice(middle, 0, "tp", before=node("mm"))
        assert repr(last) == "<staged all_gather>"
    assert (first.node.name, middle.node.name, last.node.name) == ("x_dp_1", "x_dp_2", "x_dp_3")  # x_dp is there
    assert repr(chained) == chained.node.name == "x_dp_2_tp"


def test_a_name_for_every_op_parses_back() -> None:
    """FX renames builtins; axes and hints may be anything that is a name."""
    program = Program.parse(
        "program explicit on dp=2 é=2\n  x : f32[8/dp/é] = input\nforward:\n  y : f32[8/dp/é] = neg(x)\n  return y\n"
    )
    x, y = map(program.node, "xy")
    with program.edit() as edit:
        edit.insert(aten.sum.default, (x,), before=y,
                    type=TensorType((), torch.float32, layout(program, pending=("dp", "é"))),
                    uses=[Requirement(record_of(x).type.layout, torch.float32)])  # fmt: skip
        edit.insert(aten.relu.default, (x,), before=y, type=record_of(x).type, name="mine", uses=record_of(y).uses)
        edit.insert(aten.relu.default, (x,), before=y, type=record_of(x).type, name="mine", uses=record_of(y).uses)
        edit.all_gather(x, 0, "é", before=y)
        edit.cast(x, torch.bfloat16, before=y)
    assert [node.name for node in program.nodes] == ["x", "sum_1", "mine", "mine_1", "x__", "x_bfloat16", "y", "output"]
    program.verify()
    assert Program.parse(str(program)) == program
    assert program.graph.create_node("call_function", aten.relu.default, (x,), name="mine").name not in (
        "mine",
        "mine_1",
    )


def test_inserted_nodes_know_where_they_come_from() -> None:
    """Phase of what they stand before, module and source of what they serve, unless told otherwise."""
    program = base()
    with program.edit() as edit:
        plain = edit.slice(program.node("add"), 1, "tp", before=program.node("mul"))
        told = edit.slice(program.node("add"), 1, "tp", before=program.node("mul"), phase="update")
    for staged, phase in ((plain, "backward"), (told, "update")):
        record = record_of(staged.node)
        assert (record.phase, record.module) == (phase, "block")
        assert record.source == record_of(program.node("add")).source != ""
        assert record.type == TensorType((8, 4), torch.float32, layout(program, "dp", "tp"))
        assert record.uses == ()


def test_concat_joins_and_tells_its_requirements() -> None:
    program = base()
    mul = program.node("mul")
    with program.edit() as edit:
        joined = edit.concat([program.node("x_dp"), program.node("g_tp")], 1, before=mul)
        edit.slice(joined, 1, "tp", before=mul)
    assert lines(program)["cat"] == "f32[8 8] = cat([x_dp, g_tp], 1)"
    assert lines(program)["cat_tp"] == "f32[8 8/tp] = slice(cat, 1, tp)"
    program.verify()


def test_one_occurrence_or_all_of_them() -> None:
    program = base()
    add, relu, x, x_dp = map(program.node, ("add", "relu", "x", "x_dp"))
    with program.edit() as edit:
        edit.replace_use(add, relu, x, index=1)
    assert lines(program)["add"] == "f32[8/dp 4] = add.Tensor(relu, x)"
    with program.edit() as edit:
        edit.replace_use(add, relu, x)
        copy = edit.slice(x_dp, 0, "dp", before=add)
        edit.replace_use(add, x, copy, index=0)
    assert lines(program)["add"] == "f32[8/dp 4] = add.Tensor(x_dp_dp, x)"
    with program.edit() as edit:
        again = edit.insert(
            aten.neg.default, (x,), before=x.next.next.next, type=record_of(x).type, uses=record_of(relu).uses
        )
        edit.replace_all_uses(x, again)  # but in what replaces it
    assert lines(program)["neg_1"] == "f32[8/dp 4] = neg(x)"
    assert all(node.args[0] is not x for node in program.nodes if node.op == "call_function" and node is not again.node)
    program.verify()


# -- types are carried -------------------------------------------------------------------------------------------


def test_changed_types_are_carried_to_the_transfers_that_read_them() -> None:
    program = base()
    x, neg = program.node("x"), program.node("neg")
    with program.edit() as edit:
        late = edit.slice(program.node("x_dp"), 0, "tp", before=neg)
        edit.annotate(x, type=TensorType((16, 4), torch.bfloat16, layout(program, "dp", None)))
    assert lines(program)["x_dp"] == "bf16[16 4] = all_gather(x, 0, dp)"
    assert lines(program)["x_dp_tp"] == "bf16[16 4/tp] = slice(x_dp, 1, tp)"
    assert lines(program)[late.node.name] == "bf16[16/tp 4] = slice(x_dp, 0, tp)"
    assert lines(program)["relu"] == "f32[8/dp 4] = relu(x as f32[16/dp 4])"  # an op keeps its own
    assert program.counts.record_updates == 4 and program.counts.commits == 1
    with program.edit() as edit:
        edit.annotate(program.node("ln"), type=(record_of(x).type, None, None))
    assert lines(program)["y"] == "bf16[16/dp 4] = ln[0]"


@pytest.mark.parametrize("sync", [False, True])
def test_a_transfer_that_reads_something_else_has_another_type(sync: bool) -> None:
    program = base()
    with program.edit(sync=sync) as edit:
        edit.replace_use(program.node("x_dp_tp"), program.node("x_dp"), program.node("relu"))
    assert lines(program)["x_dp_tp"] == "f32[8/dp 4/tp] = slice(relu, 1, tp)"


def test_types_are_carried_through_a_transfer_of_which_something_else_is_said() -> None:
    for sync in (False, True):
        program = base()
        x = program.node("x")
        with program.edit(sync=sync) as edit:
            edit.annotate(program.node("x_dp"), phase="backward")
            edit.annotate(x, type=replace(record_of(x).type, dtype=torch.bfloat16))
        assert lines(program)["x_dp_tp"] == "bf16[8 4/tp] = slice(x_dp, 1, tp)"


def test_what_is_said_of_a_transfer_does_not_change_its_type() -> None:
    program = base()
    x_dp = program.node("x_dp")
    with program.edit() as edit:
        edit.annotate(x_dp, type=record_of(program.node("x")).type, phase="backward")
    assert (record_of(x_dp).type, record_of(x_dp).phase) == (
        TensorType((8, 4), torch.float32, layout(program, None, None)),
        "backward",
    )
