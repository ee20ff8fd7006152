"""Golden files of mixed precision: a program, ``---``, what the pass makes of it, ``---``, and that with its transfers.

``pytest --update-goldens`` rewrites the last two. The policy stands in the comment on top.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.ir.program import Program
from autopar.passes import PIPELINE, Amp, run_passes
from autopar.verify.levels import verify

CASES = sorted((Path(__file__).parent / "golden" / "amp").glob("*.txt"))


@pytest.mark.parametrize("path", CASES, ids=[path.stem for path in CASES])
def test_golden(path: Path, update_goldens: bool) -> None:
    before, asked, explicit = path.read_text().split("---\n")
    program = Program.parse(before)
    verify(program)
    run_passes(program, [Amp(before.removeprefix("# ").partition(":")[0])])
    first = str(program)
    run_passes(program, [step() for step in PIPELINE])
    if update_goldens:
        path.write_text("---\n".join((before, first, str(program))))
    else:
        assert (first, str(program)) == (asked, explicit)


def halves(name: str) -> tuple[str, str, str]:
    before, asked, explicit = next(path for path in CASES if path.stem == name).read_text().split("---\n")
    return before, asked, explicit


def test_weights_are_gathered_narrow() -> None:
    lines = [line.split(" = ") for line in halves("gather")[2].splitlines() if "all_gather(" in line or "reduce" in line]
    assert lines and all(" : bf16[" in left for left, _ in lines)


def test_one_cast_for_two_uses() -> None:
    assert halves("two_uses")[2].count("= cast(exp, bf16)") == 1
