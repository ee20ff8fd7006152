"""Golden files of stages: the program of a micro-batch, and that of each stage.

The comment behind a value, ``# 2``, is its stage; one without runs on all that read it. ``pytest --update-goldens``
rewrites the stages. What the files must show, each, is said below.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from pipelined_programs import random_values, read, run_stages, run_whole, stages_of

from autopar.ir.nodes import name_of
from autopar.scheduling.programs.functions import functions_of
from autopar.step.pipelined.cutting.stage_programs import StageProgram

GOLDEN = Path(__file__).parent / "stages"
CASES = sorted(path.stem for path in GOLDEN.glob("*.txt"))
SEPARATOR = "---\n"


def cut(name: str) -> list[StageProgram]:
    text = (GOLDEN / f"{name}.txt").read_text().split(SEPARATOR)[0]
    return stages_of(text, stages_in(text))


def stages_in(text: str) -> dict[str, int]:
    return {name: int(stage) for name, stage in re.findall(r"^  (\w+) : [^#\n]*  # (\d+)$", text, re.MULTILINE)}


def written(stage: StageProgram) -> str:
    """A program, and what goes over the boundary before it."""
    up = ", ".join(stage.from_before)
    down = ", ".join(f"{value} {_where(stage, at)}" for value, at in stage.down.items())
    boundary = f"# receives {up}; sends back {down or 'nothing'}\n" if stage.from_before or stage.down else ""
    return f"{boundary}{stage.program}"


def _where(stage: StageProgram, at: str | int) -> str:
    if isinstance(at, int):
        return f"which is returned {at}"
    return "as it came" if at in stage.from_behind.values() else f"as the gradient of {at}"


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, update_goldens: bool) -> None:
    path = GOLDEN / f"{name}.txt"
    micro, *wanted = path.read_text().split(SEPARATOR)
    made = [written(stage) for stage in cut(name)]
    if update_goldens:
        path.write_text(SEPARATOR.join([micro, *made]))
        wanted = made
    assert made == wanted


def in_float64(text: str) -> str:
    """Every floating dtype is float64, so that only the dataflow counts."""
    return re.sub(r"\b(f32|bf16|f16)\b", "f64", text)


@pytest.mark.parametrize("name", CASES)
def test_stages_compute_what_the_whole_does(name: str) -> None:
    """Each state is replaced by one stage, but for sums: what the stages add up is what the whole adds."""
    text = in_float64((GOLDEN / f"{name}.txt").read_text().split(SEPARATOR)[0])
    whole = read(text)
    given = random_values(whole)
    wanted = run_whole(whole, given)
    found, _ = run_stages(stages_of(text, stages_in(text)), given)
    for state, value in wanted.items():
        made = [of_stage[state] for of_stage in found if state in of_stage]
        before = given[next(name_of(node) for node in whole.placeholders if node.name == state)]
        assert len(made) == 1 or state.endswith("_grad")
        torch.testing.assert_close(sum(one - before for one in made), value - before)


def test_a_skip_goes_through_the_stage_between() -> None:
    """Which computes nothing with x1, and sends on the gradient of x0 without having added to it."""
    text = (GOLDEN / "skip.txt").read_text().split(SEPARATOR)[0]
    _, crossed = run_stages(stages_of(in_float64(text), stages_in(text)), random_values(read(in_float64(text))))
    assert crossed == [["x0", "x1"], ["x0", "x1", "x2"], [], ["d_x4", "d_x1"], ["d_x1", "d_x0"], []]


def test_no_gradient_of_a_tied_parameter_crosses() -> None:
    text = (GOLDEN / "tied.txt").read_text().split(SEPARATOR)[0]
    first, second = cut("tied")
    assert list(second.down) == ["d_x1"] and not first.down
    assert [part.gradients for part in (first, second)] == [("w",), ("w",)]
    assert (first.has_loss, second.has_loss) == (False, True)
    assert "both" not in f"{first.program}{second.program}" and "both : " in text


@pytest.mark.parametrize("name", CASES)
def test_a_pass_reads_what_it_has(name: str) -> None:
    """The forward reads nothing that comes from behind."""
    for stage in cut(name):
        for function in functions_of(stage.program, whole=False):
            if function.phases == ("forward",):
                assert not {node.name for node in function.takes} & set(stage.from_behind.values())
