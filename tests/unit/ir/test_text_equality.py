"""The program's text: programs are equal exactly where their texts are."""

from __future__ import annotations

import pytest
import torch
from dense_program import DENSE
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import programs

from autopar.errors import TextError
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import record_of, set_record
from autopar.ir.program import Program
from autopar.ir.program_data import LEVELS
from autopar.ir.record import PHASES, Result, TensorType
from autopar.ir.text.tokens import Cursor


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(programs(), st.data())
def test_any_single_change_is_seen(program: Program, data: st.DataObject) -> None:
    """Records, arguments, order and header: a changed copy differs from the program, and so does its text."""
    changed = program.copy()
    node = data.draw(st.sampled_from(list(changed.nodes)))
    record = record_of(node)
    fields = {
        "type": TensorType((997,), torch.float64),
        "uses": (*record.uses, None),
        "phase": next(p for p in PHASES if p != record.phase),
        "role": "none",
        "index": 997,
        "name": "another name",
        "results": (*record.results, Result("return")),
        "stream": "another",
        "started": not record.started,
    }
    what = data.draw(
        st.sampled_from(
            [*fields, "args", "kwargs", "tree", "streams", "level", "mesh", "at", "stage", "name_", "comment"]
        )
    )
    if what in fields:
        set_record(node, record._replace(**{what: fields[what]}))
    elif what == "args":
        node.args = (*node.args, 1)
    elif what == "kwargs":
        node.kwargs = {**node.kwargs, "another": -0.0}
    elif what == "tree":
        changed.tree = (*changed.tree, " ")
    elif what == "streams":
        changed.streams = (*changed.streams, "another")
    elif what == "level":
        changed.level = next(level for level in LEVELS if level != program.level)
    elif what == "mesh":
        changed.mesh = Mesh(another=2)
    elif what == "at":
        changed.coordinates = {"another": 0}
    elif what == "stage":
        changed.stages["another"] = Mesh(another=2, name="another")
    elif what == "name_":
        node.name = "another"
    else:
        set_record(node, record._replace(module="another", source="another"))
    assert (changed == program) == (what == "comment")


def test_equal_means_the_same_kind_of_zero() -> None:
    def text(literal: str) -> str:
        return (
            f"program traced\n  x : f32[2] = input\nforward:\n  c : f32[] = constant({literal})\n  y : f32[2] = "
            f"add.Scalar(x, {literal})\n"
        )

    kinds = {
        literal: Program.parse(text(literal)) for literal in ("0", "0.0", "-0.0", "nan", "1", "1.0", "True", "False")
    }
    for literal, program in kinds.items():
        assert [other for other in kinds if kinds[other] == program] == [literal]
        assert str(program) == text(literal)
        assert program == Program.parse(text(literal))
    assert kinds["0"] != text("0")


def mutations(text: str) -> list[str]:
    """Every token of every line replaced by each token of its kind that occurs in the text, and left out."""
    cursor = Cursor()
    lines = text.splitlines()
    where = []
    for k, line in enumerate(lines):
        cursor.open(k, line)
        where += [(k, token) for token in cursor.tokens]
    kinds = {
        kind: sorted({token.text for _, token in where if token.kind == kind})
        for kind in ("word", "number", "string", "sign")
    }
    found = []
    for k, token in where:
        for other in ("", *kinds[token.kind]):
            if other != token.text:
                changed = lines[k][: token.start] + other + lines[k][token.end :]
                found.append("\n".join([*lines[:k], changed, *lines[k + 1 :]]) + "\n")
    return found


@pytest.mark.long
def test_equality_is_that_of_the_text_whatever_token_changes() -> None:
    base = Program.parse(DENSE)
    assert str(base) == DENSE
    parsed = refused = 0
    for text in mutations(DENSE):
        try:
            other = Program.parse(text)
        except TextError:
            refused += 1
            continue
        parsed += 1
        assert (other == base) == (str(other) == DENSE), text
        assert Program.parse(str(other)) == other, text
    assert parsed > 400 and refused > 2000


def test_order_of_lines_is_meaning() -> None:
    base = Program.parse(DENSE)
    lines = DENSE.splitlines(keepends=True)
    swapped = 0
    for k in range(1, len(lines) - 1):
        try:
            other = Program.parse("".join([*lines[:k], lines[k + 1], lines[k], *lines[k + 2 :]]))
        except TextError:
            continue
        swapped += other != base
        assert (other == base) == (str(other) == DENSE)
    assert swapped >= 9  # results have one order, however they are written


def test_diff_is_the_lines_that_differ() -> None:
    base = Program.parse(DENSE)
    other = Program.parse(DENSE.replace("op=max", "op=min"))
    assert base.diff(base) == ""
    changed = [line for line in base.diff(other).splitlines() if line[0] in "+-"]
    assert changed == [
        "-  b_tp : bf16[12 6] = all_reduce(b, tp, op=max)",
        "+  b_tp : bf16[12 6] = all_reduce(b, tp, op=min)",
    ]
