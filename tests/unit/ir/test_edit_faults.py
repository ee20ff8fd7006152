"""Edits: an interrupt at any line of a commit, or of what undoes it, leaves the program as it was; and one edit is open
at a time."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from edit_scripts import Call, Script, draw_script
from edited_program import TEXT, base
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import EditError, VerifyError
from autopar.ir import edit as edits
from autopar.ir.edit import HALF_DONE, OPEN, Edit
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.torch_private import graphs as torch_graphs
from autopar.torch_private import inputs_of

MODULES = (
    torch_graphs,
    *(import_module(f"autopar.ir.{name}") for name in ("edit", "commit", "uses", "nodes", "program_data", "program")),
)
FILES = {str(module.__file__) for module in MODULES}
FILES |= {torch.fx.graph.__file__, torch.fx.node.__file__}


@contextlib.contextmanager
def fault_at(*places: int, fault: type[BaseException] = KeyboardInterrupt) -> Iterator[list[str]]:
    """Raise at these lines, counted from the first that runs in the files of edits; yields the lines that ran. What C
    code has called raises a SystemError instead."""
    lines: list[str] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name == "create_name":
            return None
        if event == "line":
            lines.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            if len(lines) - 1 in places:
                raise fault
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def exact(program: Program) -> list[Any]:
    """All of a program: the node objects in both directions, what they read and who reads them, in order; records,
    torch's tables, counts."""
    graph, nodes = program.graph, list(program.nodes)
    found: list[Any] = [
        replace(program.counts),
        len(graph.nodes),
        list(map(id, nodes)),
        list(map(id, reversed(graph.nodes)))[::-1],
    ]
    found += [(node.name, repr(node.args), repr(node.kwargs), list(map(id, operands(node))), list(map(id, node.users)),
               id(record_of(node)), node._sort_key, list(map(id, inputs_of(node)))) for node in nodes]  # fmt: skip
    found += [list(map(id, graph.find_nodes(op=op))) for op in ("placeholder", "output", "get_attr")]
    return found + [
        list(map(id, graph.find_nodes(op="call_function", target=target))) for target in dict.fromkeys(TARGETS)
    ]


def after(program: Program) -> str:
    """What another edit makes of it."""
    with program.edit() as edit:
        first = edit.slice(program.node("g_tp"), 0, "dp", before=program.node("mul"))
        edit.replace_use(program.node("add"), program.node("relu"), program.node("x"), index=0)
        edit.cast(first, torch.bfloat16, before=program.node("mul"))
    program.graph.lint()
    return str(program)


TARGETS = [node.target for node in base().nodes if node.op == "call_function"]
V, LIKE_G_TP = "value", "the type of g_tp"
x, w, g, relu, x_dp, x_dp_tp, add, ln, y, g_tp, mul, mm, neg, output = ((V, number) for number in range(14))
aten = torch.ops.aten
SCRIPTS: dict[str, list[Call]] = {
    "insertions": [("pend", (x, "tp"), {"before": relu}), ("slice", (g_tp, 0, "dp"), {"before": mul}),
                   ("cast", ((V, 15), torch.bfloat16), {"before": neg})],
    "uses": [
        ("replace_use", (add, relu, x), {"index": 0}), ("replace_use", (mul, x_dp, g_tp), {}),
        ("replace_use", (output, neg, mm), {}), ("replace_use", (add, relu, x), {}),
        ("replace_use", (mul, g_tp, x_dp), {"index": 0}),
    ],
    "all "
    "uses": [("slice", (x, 1, "tp"), {"before": relu}), ("all_gather", ((V, 14), 1, "tp"), {"before": relu}),
             ("replace_all_uses", (relu, (V, 15)), {})],
    "erasures": [("replace_all_uses", (neg, mm), {}), ("erase", (neg,), {}), ("replace_all_uses", (x_dp_tp, mm), {}),
                 ("erase", (x_dp_tp,), {})],
    "erasures of neighbours, and of what was inserted": [
        ("pend", (y, "tp"), {"before": g_tp}), ("replace_all_uses", (neg, g_tp), {}), ("erase", (neg,), {}),
        ("erase", (mm,), {}), ("erase", (w,), {}), ("erase", ((V, 14),), {}),
    ],
    "types": [("annotate", (x,), {"phase": "update"}), ("annotate", (g,), {"source": "a.py:1"}),
              ("cast", (x_dp, torch.float16), {"before": mul}), ("replace_use", (x_dp_tp, x_dp, relu), {}),
              ("annotate", (x,), {"phase": "forward"})],
    "names": [("slice", (g_tp, 0, "dp"), {"before": mul}), ("slice", (g_tp, 0, "dp"), {"before": mul}),
              ("slice", ((V, 14), 1, "tp"), {"before": mul}),
              ("insert", (aten.neg.default, [(V, 14)]), {"before": mul, "type": LIKE_G_TP, "name": "mine"})],
}  # fmt: skip


def play_in(edit: Edit, calls: list[Call], after_each: Callable[[], None] = lambda: None) -> None:
    values: list[Any] = list(edit.program.nodes)
    for name, args, kwargs in calls:
        Script.one(
            edit,
            values,
            (name, args, {**kwargs, "type": record_of(values[9]).type} if kwargs.get("type") == LIKE_G_TP else kwargs),
        )
        after_each()


def play(program: Program, calls: list[Call], mode: str) -> None:
    with program.edit(sync=mode == "sync") as edit:
        play_in(edit, calls, edit.commit if mode == "explicit" else lambda: None)


EACH_LINE = pytest.mark.sweep("other kinds have most of these lines too, and every third or thirteenth is interrupted")


@pytest.mark.simulated
@pytest.mark.parametrize(("mode", "step"), [
    ("batched", 3), ("explicit", 13), ("sync", 13),
    *(pytest.param(mode, step, marks=EACH_LINE) for mode, step in [("batched", 1), ("explicit", 5), ("sync", 5)]),
])  # fmt: skip
@pytest.mark.parametrize("kind", SCRIPTS)
def test_an_interrupt_at_any_line_of_an_edit_leaves_the_program_as_it_was(kind: str, mode: str, step: int) -> None:
    """Beginning, staging, commit, end: the line is one of the next each time, until the edit runs through. A kind
    begins at a line of its own."""
    whole, program = base(), base()
    play(whole, SCRIPTS[kind], mode)
    before = exact(program)
    for place in itertools.count(list(SCRIPTS).index(kind) % step, step):
        with contextlib.suppress(KeyboardInterrupt, SystemError), fault_at(place) as lines:
            play(program, SCRIPTS[kind], mode)
        if len(lines) <= place:
            break
        assert exact(program) == before and not edits._OPEN.get(program.graph), (
            f"an interrupt at {lines[place]} left something"
        )
    assert place > 100 and str(program) == str(whole)


@pytest.mark.simulated
@pytest.mark.parametrize("kind", SCRIPTS)
def test_an_interrupt_while_an_edit_is_undone_leaves_the_program_as_it_was(kind: str) -> None:
    """At any line, after an exception of the user's in the block."""
    program = base()
    before = exact(program)
    calls = [call for call in SCRIPTS[kind] if call[0] != "erase"]

    def refused(tracing: contextlib.AbstractContextManager[list[str]]) -> list[str]:
        with contextlib.suppress(ZeroDivisionError, MemoryError, SystemError), program.edit() as edit:
            play_in(edit, calls)
            edit.commit()
            lines = tracing.__enter__()
            raise ZeroDivisionError
        tracing.__exit__(None, None, None)
        return lines

    for place in itertools.count():
        lines = refused(fault_at(place, fault=MemoryError))
        if len(lines) <= place:
            break
        assert exact(program) == before and not edits._OPEN.get(program.graph), (
            f"a lack of memory at {lines[place]} left something"
        )
    assert place > 50


@pytest.mark.simulated
@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["sync", "explicit", "batched"]), st.floats(0, 1, exclude_max=True))
def test_an_interrupt_of_a_random_edit(data: st.DataObject, mode: str, place: float) -> None:
    script, fine = draw_script(data, data.draw(st.integers(1, 8)))
    if not fine:
        return
    play(base(), script.calls, mode)  # caches are filled now, so the next two runs go through the same lines
    program, other = base(), base()
    with fault_at() as lines:
        play(other, script.calls, mode)
    before = exact(program)
    with contextlib.suppress(KeyboardInterrupt, SystemError), fault_at(int(place * len(lines))) as run:
        play(program, script.calls, mode)
    assert len(run) > int(place * len(lines)), "no line was interrupted"
    assert exact(program) == before, f"an interrupt at {run[-1]} left something"


def test_an_edit_that_is_interrupted_whenever_it_is_undone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    program = base()
    monkeypatch.setattr("autopar.ir.commit.relink", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), program.edit(sync=True) as edit:
        edit.pend(program.node("x"), "tp", before=program.node("relu"))
        raise ZeroDivisionError
    monkeypatch.undo()
    with pytest.raises(EditError) as caught, program.edit():
        pass
    assert str(caught.value) == HALF_DONE
    with pytest.raises(VerifyError) as inconsistent:
        program.verify()
    assert str(inconsistent.value) == f"this explicit program is inconsistent\n  {HALF_DONE}"


# -- one edit at a time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [False, True])
def test_a_second_open_edit_is_refused_and_the_first_goes_on(sync: bool) -> None:
    program = base()
    with program.edit(sync=sync) as edit:
        edit.pend(program.node("x"), "tp", before=program.node("relu"))
        with pytest.raises(EditError) as caught, program.edit(sync=sync) as second:
            second.pend(program.node("x"), "tp", before=program.node("relu"))
        edit.slice(program.node("g_tp"), 0, "dp", before=program.node("mul"))
    assert str(caught.value) == OPEN
    alone = base()
    with alone.edit(sync=sync) as edit:
        edit.pend(alone.node("x"), "tp", before=alone.node("relu"))
        edit.slice(alone.node("g_tp"), 0, "dp", before=alone.node("mul"))
    assert str(program) == str(alone)


@pytest.mark.parametrize("sync", [False, True])
def test_the_users_error_in_nested_edits_is_the_one_that_is_seen(sync: bool) -> None:
    program = base()
    before = exact(program)
    with pytest.raises(ZeroDivisionError), program.edit(sync=sync) as edit:
        x_tp = edit.pend(program.node("x"), "tp", before=program.node("relu"))
        with contextlib.suppress(EditError), program.edit(sync=sync) as second:
            second.replace_use(program.node("relu"), program.node("x"), x_tp.node or program.node("g"))
        raise ZeroDivisionError
    assert exact(program) == before
    assert after(program) == after(base())


def test_programs_that_share_a_graph_have_one_open_edit() -> None:
    text = "program local on dp=2 at dp={}\n  x : f32[4] = input\nforward:\n  y : f32[4] = relu(x)\n  return y\n"
    program = Program.parse(text.format(0))
    with program.edit(), pytest.raises(EditError, match=OPEN), program.at({"dp": 1}).edit():
        pass
    with Program.parse(text.format(0)).edit(), program.edit():  # another graph
        pass


def test_an_edit_begins_with_its_block_and_ends_with_it() -> None:
    program = base()
    edit = program.edit()
    with pytest.raises(
        EditError,
        match=r"^this edit has not begun; call its operations inside its block: with program.edit\(\) as edit:$",
    ):
        edit.pend(program.node("x"), "tp", before=program.node("relu"))
    with edit, pytest.raises(EditError, match=OPEN), edit:
        pass
    for use in (edit.__enter__, edit.commit, lambda: edit.erase(program.node("neg"))):
        with pytest.raises(EditError, match="this edit is over"):
            use()
    with program.edit() as other:
        other.pend(program.node("x"), "tp", before=program.node("relu"))
    done = exact(program)
    edit.__exit__(ValueError, ValueError(), None)  # what was done since stays
    other.__exit__(ValueError, ValueError(), None)
    assert exact(program) == done


def test_edits_of_an_edit_made_before_others_undo_only_their_own() -> None:
    """Counts are those when the block began, and not those when ``edit()`` was called."""
    program = base()
    early = program.edit(sync=True)
    after(program)
    before = exact(program)
    with pytest.raises(ZeroDivisionError), early:
        early.pend(program.node("x"), "tp", before=program.node("relu"))
        raise ZeroDivisionError
    assert exact(program) == before


@pytest.mark.long
def test_an_edit_that_nobody_has_any_more_is_not_open() -> None:
    def suspended(program: Program) -> Iterator[Edit]:
        with program.edit(sync=True) as edit:
            edit.pend(program.node("x"), "tp", before=program.node("relu"))
            yield edit

    program = base()
    before = exact(program)
    generator = suspended(program)
    next(generator)
    with pytest.raises(EditError, match=OPEN), program.edit():
        pass
    generator.close()
    assert exact(program) == before
    abandoned = program.edit().__enter__()
    del abandoned
    gc.collect()
    assert after(program) == after(base())


def test_an_edit_in_another_thread_is_refused_while_one_is_open() -> None:
    program, said = base(), []

    def other() -> None:
        try:
            after(program)
        except EditError as error:
            said.append(str(error))

    with program.edit():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert said == [OPEN] and str(program) == TEXT


@pytest.mark.parametrize("copied", [Program.copy, copy.deepcopy])
def test_a_copy_of_a_program_with_an_open_edit_is_one_without(copied: Callable[[Program], Program]) -> None:
    program = base()
    with program.edit() as edit:
        edit.pend(program.node("x"), "tp", before=program.node("relu"))
        twin = copied(program)
        assert after(twin) == after(base())
    assert str(program) != TEXT


def test_an_edit_while_nodes_are_gone_through() -> None:
    program = base()
    for node in program.nodes:
        if node.name in ("x_dp_tp", "neg"):
            with program.edit() as edit:
                edit.replace_all_uses(node, next(iter(node.all_input_nodes)))
                edit.erase(node)
    assert [node.name for node in program.nodes if node.name in ("x_dp_tp", "neg")] == []
    program.graph.lint()
