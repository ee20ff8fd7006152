"""Commits: names that follow what is read, replacements by position, transfers of what has no Layout."""

from __future__ import annotations

import pytest
from edited_program import TEXT, base, lines

from autopar.errors import EditError
from autopar.ir.program import Program


@pytest.mark.parametrize("sync", [False, True])
def test_a_transfer_that_reads_something_else_is_named_after_it(sync: bool) -> None:
    """Also where it had a name from an earlier commit, and where others are named after it."""
    program = base()
    node = program.node
    with program.edit(sync=sync) as edit:
        split = edit.slice(node("x_dp"), 0, "tp", before=node("mul"))
        again = edit.slice(split, 1, "dp", before=node("mul"))
        edit.replace_use(split, node("x_dp"), node("g_tp"))
    assert (split.node.name, again.node.name) == ("g_tp_tp", "g_tp_tp_dp")
    assert lines(program)["g_tp_tp_dp"] == "f32[8/tp 4/dp] = slice(g_tp_tp, 1, dp)"


def test_an_operand_is_replaced_only_where_it_stands() -> None:
    program = base()
    node = program.node
    with (
        pytest.raises(EditError, match=r"^mul does not read x_dp as operand 0; it reads g_tp, x_dp$"),
        program.edit() as edit,
    ):
        edit.replace_use(node("mul"), node("x_dp"), node("g_tp"), index=0)
    assert str(program) == TEXT
    with program.edit() as edit:
        edit.replace_use(node("mul"), node("x_dp"), node("g_tp"), index=1)
    assert list(node("mul").args) == [node("g_tp"), node("g_tp")]


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("index", [None, 0])
def test_what_was_replaced_may_be_replaced_again(sync: bool, index: int | None) -> None:
    """At once, and after another user was spoken of."""
    program = base()
    node = program.node
    with program.edit(sync=sync) as edit:
        edit.replace_use(node("add"), node("relu"), node("x"), index=index)
        edit.replace_use(node("add"), node("x"), node("x_dp"), index=index)
        edit.replace_use(node("mul"), node("g_tp"), node("x_dp"))
        edit.replace_use(node("add"), node("x_dp"), node("x_dp_tp"), index=index)
        edit.replace_use(node("mul"), node("x_dp"), node("y"))
    second = node("relu") if index == 0 else node("x_dp_tp")
    assert list(node("add").args) == [node("x_dp_tp"), second]
    assert list(node("mul").args) == [node("y"), node("y")]


def test_a_record_has_only_its_fields() -> None:
    program = base()
    with (
        pytest.raises(TypeError, match=r"^a record has no colour; it has type, uses, phase, role, "),
        program.edit() as edit,
    ):
        edit.annotate(program.node("add"), phase="backward", colour="red")
    assert str(program) == TEXT


def test_what_has_no_layout_cannot_be_transferred() -> None:
    program = Program.parse(
        "program traced on dp=2\n  x : f32[8] = input\nforward:\n  y : f32[8] = relu(x)\n  return y\n"
    )
    with (
        pytest.raises(EditError, match=r"^slice\(x, 0, dp\): x has no Layout; transfers work on placed values$"),
        program.edit() as edit,
    ):
        edit.slice(program.node("x"), 0, "dp", before=program.node("y"))
