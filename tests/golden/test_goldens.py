"""Golden files: one text file a case, the input, ``---``, and what the pass (the folder) makes of it.

``pytest --update-goldens`` rewrites what stands behind the inputs. ``whole`` is the pipeline from traced to explicit.
``cuda`` is the same for programs that were captured on CUDA, and what a rank runs: their kernels run on a GPU only, so
text is all that is compared.
"""

from __future__ import annotations

import re
from pathlib import Path

import golden_values
import pytest
import torch
from goldens import (
    CASES,
    FOLDERS,
    GOLDEN,
    PASSES,
    SEPARATOR,
    case_name,
    coordinates,
    expected,
    order_of,
    read,
    run_pass,
)

from autopar.ir.ops.seeded_random import FUSED_DROPOUT
from autopar.ir.program import Program
from autopar.rules.by_schema import BY_SCHEMA
from autopar.runtime.localize import localize

EACH = pytest.mark.parametrize("path", CASES, ids=case_name)
COMPUTED = pytest.mark.parametrize("path", [path for path in CASES if path.parent.name != "cuda"], ids=case_name)
NOT_RUN = {  # golden file → why its values are not compared
    "localize/random_ops_draw_from_a_seed_of_their_piece": "pieces are drawn from seeds of their own"
}


@EACH
def test_golden(path: Path, update_goldens: bool) -> None:
    before, *after = path.read_text().split(SEPARATOR)
    made = expected(path.parent.name, before)
    if update_goldens:
        path.write_text(SEPARATOR.join((before, *made)))
    else:
        assert made == after


@COMPUTED
def test_each_part_computes_the_same(path: Path) -> None:
    """Input and result, on simulated ranks, against the input on a single device; all in float64."""
    if case_name(path) in NOT_RUN:
        pytest.skip(NOT_RUN[case_name(path)])
    before, *after = path.read_text().split(SEPARATOR)
    reference = golden_values.in_float64(before)
    addends = golden_values.random_addends(reference)
    of_one_rank = path.parent.name in ("localize", "schedule")
    order = order_of(before) if path.parent.name == "schedule" else None
    for part in (before, *(() if of_one_rank else after)):
        program = golden_values.explicit(golden_values.in_float64(part))
        wanted = golden_values.on_one_device(reference, golden_values.global_values(program, addends))
        results = golden_values.on_simulated_ranks(program, addends, order)
        assert len(results) == len(wanted)
        for result, want in zip(results, wanted, strict=True):
            assert torch.allclose(result, want, rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("path", [path for path in CASES if path.parent.name in PASSES], ids=case_name)
def test_a_pass_commits_once_or_leaves_the_program_alone(path: Path) -> None:
    before = path.read_text().split(SEPARATOR)[0]
    program, report = run_pass(path.parent.name, before)
    untouched = read(before)
    untouched.level = program.level
    changed = program != untouched
    assert report.commits == changed
    assert changed or not report.inserted + report.removed


@pytest.mark.parametrize("path", [path for path in CASES if path.parent.name == "localize"], ids=case_name)
def test_localize_leaves_the_explicit_program_alone(path: Path) -> None:
    before = path.read_text().split(SEPARATOR)[0]
    program = read(before)
    text, commits = str(program), program.counts.commits
    local = localize(program, coordinates(before))
    assert (str(program), program.counts.commits, local.counts.commits) == (text, commits, 0)
    assert Program.parse(str(local)) == local


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_pass_has_goldens(folder: str) -> None:
    assert len(list((GOLDEN / folder).glob("*.txt"))) >= 6


def test_every_kernel_of_accelerators_has_a_golden() -> None:
    text = "".join(path.read_text() for path in (GOLDEN / "cuda").glob("*.txt"))
    drawn = {f"drawn::{name}" for name in FUSED_DROPOUT}
    assert {name for name in BY_SCHEMA | drawn if f"= {name}(" not in text} == set()


def test_reasons_name_files() -> None:
    assert set(map(case_name, CASES)) >= NOT_RUN.keys()


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
    assert counts("whole/column_row_pair.txt") == {
        "tp": {"forward": 1, "backward": 1},
        "dp": {"forward": 0, "backward": 4},
    }


def test_sharing_stays_within_a_phase() -> None:
    """Six gathers of the forward become two, and one that starts elsewhere; the backward keeps its own two."""
    lines = (GOLDEN / "share" / "two_uses.txt").read_text().partition("---\n")
    before, after = (lines[k].partition("backward:") for k in (0, 2))
    assert [half.count("all_gather(") for half in (before[0], before[2], after[0], after[2])] == [6, 2, 3, 2]
