"""Edits: what is refused says why, and nothing is left of an edit that fails."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from edit_scripts import Script, draw_script
from edited_program import TEXT, base, lines
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import EditError
from autopar.ir import transfers
from autopar.ir.edit import Edit, Staged
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program

aten = torch.ops.aten


# -- nothing is left ---------------------------------------------------------------------------------------------


def snapshot(program: Program) -> list[Any]:
    """Every node object with what it reads, who reads it, what is known of it; the counts."""
    found: list[Any] = [replace(program.counts), program.text(comments=True)]
    for node in program.nodes:
        found.append((id(node), node.name, repr(node.args), repr(node.kwargs), [id(o) for o in operands(node)],
                      set(map(id, node.users)), id(record_of(node)), id(node.prev), id(node.next)))  # fmt: skip
    return found


@pytest.mark.simulated
@settings(max_examples=50, deadline=None)
@given(st.data(), st.sampled_from(["sync", "explicit", "batched"]))
def test_nothing_is_left_of_an_edit_that_fails(data: st.DataObject, mode: str) -> None:
    """An exception of the user's, or an operation that is refused, after any number of operations."""
    script, _ = draw_script(data, data.draw(st.integers(0, 8)))
    program = base()
    with program.edit() as edit:  # something that has been done before
        edit.pend(program.node("x"), "tp", before=program.node("relu"))
    before = snapshot(program)
    keep = list(program.nodes)
    stop = data.draw(st.integers(0, len(script.calls)))
    with pytest.raises((EditError, ZeroDivisionError)), program.edit(sync=mode == "sync") as edit:
        values: list[Any] = [node for node in keep if node.name != "x_tp"]
        for call in script.calls[:stop]:
            Script.one(edit, values, call)
            if mode == "explicit":
                edit.commit()
        refuse(edit, program, data.draw(st.sampled_from(["exception", "order", "erase", "mismatch", "use"])))
    assert snapshot(program) == before
    assert list(program.nodes) == keep
    program.graph.lint()


def refuse(edit: Edit, program: Program, how: str) -> None:
    """Something that cannot be done, at once or when it is committed."""
    node = {node.name: node for node in program.nodes}
    if how == "exception":
        raise ZeroDivisionError
    if how == "order":
        edit.replace_use(node["relu"], operands(node["relu"])[0], node["neg"])
    elif how == "erase":
        edit.erase(node["w"])
        edit.replace_use(program.output, operands(program.output)[0], node["w"])
    elif how == "mismatch":
        edit.all_gather(node["w"], 0, "dp", before=node["mm"])
        raise ZeroDivisionError  # a staged change may have made it fit
    else:
        edit.replace_use(node["relu"], node["neg"], node["x"])


def test_an_edit_after_one_that_failed_starts_afresh() -> None:
    program = base()
    for sync in (True, False):
        with pytest.raises(ZeroDivisionError), program.edit(sync=sync) as edit:
            edit.slice(program.node("g_tp"), 0, "dp", before=program.node("mul"))
            raise ZeroDivisionError
    assert str(program) == TEXT and program.counts.commits == 0
    with program.edit() as edit:
        staged = edit.slice(program.node("g_tp"), 0, "dp", before=program.node("mul"))
    assert staged.node.name == "g_tp_dp"


def test_with_sync_an_error_points_at_its_operation() -> None:
    for sync in (True, False):
        program = base()
        with pytest.raises(EditError) as caught, program.edit(sync=sync) as edit:
            edit.replace_use(program.node("relu"), program.node("x"), program.node("neg"))  # here
            edit.pend(program.node("x"), "tp", before=program.node("add"))
        frames = [frame.line or "" for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert any(line.endswith("# here") for line in frames) == sync


def test_a_refused_operation_may_be_caught_and_the_edit_goes_on() -> None:
    program = base()
    with program.edit() as edit:
        edit.pend(program.node("x"), "tp", before=program.node("relu"))
        with pytest.raises(EditError, match="not split over dp last"):
            edit.all_gather(program.node("x"), 1, "dp", before=program.node("relu"))
    assert program.counts.inserted == program.counts.commits == 1


# -- what is refused ---------------------------------------------------------------------------------------------

Operation = Callable[[Edit, Callable[[str], Any]], Any]
REFUSED: dict[str, tuple[Operation, str]] = {
    "order": (
        lambda e, n: e.replace_use(n("relu"), n("x"), n("neg")),
        "relu would read neg before it is made; insert it earlier",
    ),
    "order of an insertion": (
        lambda e, n: e.all_gather(n("neg"), 1, "tp", before=n("mm")),
        "all_gather would read neg before it is made; insert it earlier",
    ),
    "replacement by something that reads it": (
        lambda e, n: e.replace_all_uses(n("x"), n("x_dp_tp")),
        "relu would read x_dp_tp before it is made; insert it earlier",
    ),
    "no such use": (
        lambda e, n: e.replace_use(n("add"), n("x"), n("relu")),
        "add does not read x; it reads relu, relu",
    ),
    "no such operand": (
        lambda e, n: e.replace_use(n("add"), n("relu"), n("x"), index=2),
        "add does not read relu as operand 2; it reads relu, relu",
    ),
    "still read": (
        lambda e, n: e.erase(n("relu")),
        "cannot erase relu: add still read it; replace those uses first",
    ),
    "the output": (lambda e, n: e.erase(n("output")), "the output cannot be erased"),
    "a gather of a whole dim": (
        lambda e, n: e.all_gather(n("x"), 1, "dp", before=n("add")),
        "all_gather(x, 1, dp): dim 1 is not split over dp last; x is f32[8/dp 4]",
    ),
    "a used axis": (
        lambda e, n: e.slice(n("x"), 1, "dp", before=n("add")),
        "slice(x, 1, dp): the value already uses the axis dp; x is f32[8/dp 4]",
    ),
    "nothing pending": (
        lambda e, n: e.all_reduce(n("x"), "tp", before=n("add")),
        "all_reduce(x, tp): the value is not pending sum over tp; x is f32[8/dp 4]",
    ),
    "another kind": (
        lambda e, n: e.all_reduce(n("g"), "tp", op="max", before=n("add")),
        "all_reduce(g, tp, max): the value is not pending max over tp; g is f32[8 4] +tp",
    ),
    "no such axis": (
        lambda e, n: e.slice(n("x"), 0, "pp", before=n("add")),
        "slice(x, 0, pp): the mesh (dp=2 tp=2) has no axis 'pp'; its axes are dp, tp; did you mean 'tp'?; x is "
        "f32[8/dp 4]",
    ),
    "no such dim": (
        lambda e, n: e.slice(n("x"), 2, "tp", before=n("add")),
        "slice(x, 2, tp): there is no dim 2 in a value of 2; x is f32[8/dp 4]",
    ),
    "no such stage": (
        lambda e, n: e.recv(n("x"), "s2", before=n("add")),
        "recv(x, s2): there is no stage 's2'; stages are s1; x is f32[8/dp 4]",
    ),
    "a missing argument": (
        lambda e, n: e.insert(transfers.slice, (n("x"), 0), before=n("add")),
        "slice(x, 0): the argument 'axis' is missing",
    ),
    "no such stage to send to": (
        lambda e, n: e.send(n("x"), "s2", before=n("add")),
        "send(x, s2): there is no stage 's2'; stages are s1; x is f32[8/dp 4]",
    ),
    "an argument of another kind": (
        lambda e, n: e.slice(n("x"), "1", "tp", before=n("add")),
        "slice(x, 1, tp): it does not take arguments of this kind ('<=' not supported between instances of 'int' and "
        "'str')",
    ),
    "parts of another number of dims": (
        lambda e, n: e.slice(n("x"), 1, "tp", parts=((8,),), before=n("add")),
        "slice(x, 1, tp, ((8,),)): parts of 1 dims are given for a value of 2; x is f32[8/dp 4]",
    ),
    "a reduction over nothing": (
        lambda e, n: e.all_reduce(n("g"), [], before=n("add")),
        "all_reduce(g, []): a reduction needs at least one axis; g is f32[8 4] +tp",
    ),
    "no "
    "dtype": (lambda e, n: e.cast(n("x"), "f32", before=n("add")),
              "cast(x, f32): 'f32' is no torch.dtype; x is f32[8/dp 4]"),
    "no "
    "arguments": (lambda e, n: e.insert(transfers.slice, (), before=n("add")),
                  "slice got no operand, but needs a value of the program first"),
    "nothing to "
    "read": (lambda e, n: e.replace_use(n("add"), n("x"), None),
             "add cannot read None, which is no value of the program"),
    "no "
    "value": (lambda e, n: e.slice(None, 0, "tp", before=n("add")),
              "slice got None, but needs a value of the program first"),
    "several tensors": (
        lambda e, n: e.slice(n("ln"), 0, "tp", before=n("mm")),
        "slice(ln, 0, tp): ln is several tensors; transfer its elements",
    ),
    "an op without type": (
        lambda e, n: e.insert(aten.relu.default, (n("x"),), before=n("add")),
        "insert(relu.default) needs type=…: only transfers know their own type",
    ),
    "a carried type that does not fit": (
        lambda e, n: e.annotate(n("x"), type=record_of(n("g_tp")).type),
        "all_gather(x, 0, dp): dim 0 is not split over dp last; x is f32[8 4]",
    ),
    "an element that is not there": (
        lambda e, n: e.annotate(n("ln"), type=record_of(n("x")).type),
        "y reads element 0 of ln, which has no such element",
    ),
    "pieces that do not fit": (
        lambda e, n: e.concat([n("x_dp"), n("w")], 1, before=n("mul")),
        "concat needs pieces that differ only in dim 1, got f32[8 4], f32[4 4/tp]",
    ),
    "a split dim": (
        lambda e, n: e.concat([n("x"), n("x")], 0, before=n("add")),
        "concat joins along dim 0, which is split; gather it first",
    ),
    "no pieces": (lambda e, n: e.concat([], 0, before=n("add")), "concat needs pieces, each one tensor"),
    "no such dim to "
    "join": (lambda e, n: e.concat([n("x"), n("x")], -1, before=n("add")), "concat along dim -1 of a value of 2"),
    "a staged value": (
        lambda e, n: e.annotate(e.slice(n("x"), 1, "tp", before=n("add")), phase="update"),
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("sync", [False, True])
def test_what_is_refused_says_why(what: str, sync: bool) -> None:
    program = base()
    before = snapshot(program)
    operation, message = REFUSED[what]
    with pytest.raises(EditError) as caught, program.edit(sync=sync) as edit:
        operation(edit, program.node)
    if message is None:
        assert str(caught.value).startswith("annotate takes a node of the program; give insert all facts about ")
    else:
        assert str(caught.value) == message
    assert snapshot(program) == before


@pytest.mark.parametrize("name", ["sum", "lambda", "f32", "state", "a.b", "", "ü"])
def test_names_that_cannot_be_are_refused(name: str) -> None:
    program = base()
    with (
        pytest.raises(EditError, match="cannot name a value: Python, FX or the program's text has a meaning for it"),
        program.edit() as edit,
    ):
        edit.insert(
            aten.relu.default,
            (program.node("x"),),
            before=program.node("add"),
            type=record_of(program.node("x")).type,
            name=name,
        )


def test_a_transfer_that_does_not_apply_is_refused_when_other_types_change_too() -> None:
    program = base()
    x, w = program.node("x"), program.node("w")
    with (
        pytest.raises(EditError, match=r"all_gather\(w, 0, dp\): dim 0 is not split over dp last; w is f32\[4 4/tp\]"),
        program.edit() as edit,
    ):
        edit.annotate(x, type=replace(record_of(x).type, dtype=torch.bfloat16))
        edit.all_gather(w, 0, "dp", before=program.node("mm"))
    assert str(program) == TEXT


def test_nodes_of_other_programs_are_refused() -> None:
    program, other = base(), base()
    for operation in (
        lambda edit: edit.slice(other.node("x"), 1, "tp", before=program.node("add")),
        lambda edit: edit.slice(program.node("x"), 1, "tp", before=other.node("add")),
        lambda edit: edit.insert(
            aten.cat.default,
            ([program.node("x"), other.node("x")],),
            before=program.node("add"),
            type=record_of(other.node("x")).type,
        ),
        lambda edit: edit.replace_use(program.node("relu"), program.node("x"), other.node("x")),
        lambda edit: edit.replace_all_uses(other.node("x"), program.node("x")),
        lambda edit: edit.annotate(other.node("x"), phase="update"),
        lambda edit: edit.erase(other.node("x")),
    ):
        with pytest.raises(EditError) as caught, program.edit() as edit:
            operation(edit)
        assert re.fullmatch(
            r"(x|add) belongs to another program; take the node from this one, as in program.node\('(x|add)'\)",
            str(caught.value),
        )
    assert str(program) == str(other) == TEXT


def test_erased_nodes_and_values_of_other_edits_are_refused() -> None:
    program = base()
    neg = program.node("neg")
    with program.edit() as edit:
        edit.replace_all_uses(neg, program.node("mm"))
        edit.erase(neg)
    with pytest.raises(EditError, match="neg has been erased from the program"), program.edit() as edit:
        edit.slice(program.node("x"), 1, "tp", before=neg)
    kept: list[Staged] = []
    with pytest.raises(ZeroDivisionError), program.edit(sync=True) as edit:
        kept.append(edit.slice(program.node("x"), 1, "tp", before=program.node("add")))
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), program.edit() as edit:
        kept.append(edit.slice(program.node("x"), 1, "tp", before=program.node("add")))
        raise ZeroDivisionError
    for staged, why in zip(kept, ("has been erased from the program", "is not part of this edit"), strict=True):
        with pytest.raises(EditError, match=why), program.edit() as edit:
            edit.replace_use(program.node("add"), program.node("relu"), staged)
    with program.edit() as edit:
        done = edit.slice(program.node("x"), 1, "tp", before=program.node("relu"))
    with program.edit() as edit:  # a value that is there may be used
        edit.replace_use(program.node("add"), program.node("relu"), done)
    assert lines(program)["add"].endswith("add.Tensor(x_tp, x_tp)") or "as" in lines(program)["add"]


def test_an_edit_that_is_over_is_over() -> None:
    """Nothing can be staged that no commit would ever carry out."""
    program = base()
    with program.edit() as edit:
        pass
    with pytest.raises(EditError, match=r"this edit is over; begin another one with program.edit\(\)"):
        edit.erase(program.node("neg"))
    with program.edit(sync=True) as edit:
        with pytest.raises(EditError, match="before it is made"):
            edit.replace_use(program.node("relu"), program.node("x"), program.node("neg"))
        with pytest.raises(EditError, match="this edit is over"):
            edit.annotate(program.node("neg"), phase="update")
    assert str(program) == TEXT
