"""Golden files: one text file a case, the input, ``---``, and what the pass (the folder) makes of it.

``pytest --update-goldens`` rewrites the second halves. ``whole`` is the pipeline from traced to explicit; ``localize``
takes the coordinates from a ``# at dp=1 tp=0`` line on top.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autopar.ir.program import Program
from autopar.passes import PIPELINE, Defer, Expand, Fold, Follow, Lift, Place, Reshard, Share, run_passes
from autopar.runtime.localize import localize
from autopar.verify.levels import verify

GOLDEN = Path(__file__).parent / "golden"
PASSES = {"expand": (Expand,), "lift": (Lift,), "place": (Place,), "follow": (Follow,), "defer": (Defer,), "reshard": (Reshard,), "fold": (Fold,), "share": (Share,), "whole": PIPELINE}
CASES = sorted(path for folder in (*PASSES, "localize") for path in (GOLDEN / folder).glob("*.txt"))


def transform(folder: str, text: str) -> str:
    program = Program.parse(text)
    verify(program)
    if folder == "localize":
        pairs = re.search(r"# at (.*)", text)
        assert pairs is not None
        at = {axis: int(index) for axis, index in (pair.split("=") for pair in pairs[1].split())}
        local = localize(program, at)
        verify(local)
        return str(local)
    run_passes(program, [step() for step in PASSES[folder]])
    return str(program)


@pytest.mark.parametrize("path", CASES, ids=[f"{path.parent.name}/{path.stem}" for path in CASES])
def test_golden(path: Path, update_goldens: bool) -> None:
    before, _, after = path.read_text().partition("---\n")
    made = transform(path.parent.name, before)
    if update_goldens:
        path.write_text(f"{before}---\n{made}")
    else:
        assert made == after


def test_every_pass_has_goldens() -> None:
    for folder in (*PASSES, "localize"):
        assert list((GOLDEN / folder).glob("*.txt")), folder


def counts(path: str) -> dict[str, dict[str, int]]:
    """axis → phase → all-reduces in the expected half of a golden file."""
    found: dict[str, dict[str, int]] = {}
    phase = ""
    for line in (GOLDEN / path).read_text().partition("---\n")[2].splitlines():
        phase = line[:-1] if line in ("forward:", "backward:") else phase
        if call := re.search(r"all_reduce\(\w+, (\w+)\)", line):
            found.setdefault(call[1], {"forward": 0, "backward": 0})[phase] += 1
    return found


def test_a_column_row_pair_has_one_all_reduce_each_way() -> None:
    """And the reductions of the four gradients over dp."""
    assert counts("whole/column_row_pair.txt") == {"tp": {"forward": 1, "backward": 1}, "dp": {"forward": 0, "backward": 4}}


def test_sharing_stays_within_a_phase() -> None:
    """Six gathers of the forward become two, and one that starts elsewhere; the backward keeps its own two."""
    lines = (GOLDEN / "share" / "two_uses.txt").read_text().partition("---\n")
    before, after = (lines[k].partition("backward:") for k in (0, 2))
    assert [half.count("all_gather(") for half in (before[0], before[2], after[0], after[2])] == [6, 2, 3, 2]
