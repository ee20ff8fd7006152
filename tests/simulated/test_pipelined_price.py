"""The price of a step on stages: each stage has one, and their sum is none."""

from __future__ import annotations

from typing import Any

import pytest
from pipelined_steps import MESHES, made

import autopar

MACHINE = "NVIDIA H100 80GB HBM3"


def captured(name: str, mesh: str, **options: Any) -> Any:
    step, _, batches = made(name, MESHES[mesh], "1f1b", 3, **options)
    step.capture(**batches(0))
    return step


def test_the_sum_of_the_stages_is_refused() -> None:
    with pytest.raises(ValueError) as caught:
        autopar.price(captured("layers", "pp4").program, MACHINE)
    assert str(caught.value) == (
        "the 4 stages of this step run side by side, so the sum of their prices is no time of a step: price one of "
        "them, step.program.stages[0], and take the whole step from step.pipeline.simulate()"
    )


def test_each_stage_has_a_price() -> None:
    """What runs in each micro-batch counts so often, the rest once."""
    step = captured("shared", "pp2 dp2", zero=1, clip_norm=1.0)
    stages = step.program.stages
    assert len(stages) == 2
    assert all(list(stage.programs) == ["sums", "count", "copy", "micro", "update"] for stage in stages)
    for stage in stages:
        of = {name: autopar.price(program, MACHINE).nanoseconds for name, program in stage.programs.items()}
        each = sum(of[name] for name in ("micro", "sums") if name in of)
        assert autopar.price(stage, MACHINE).nanoseconds == sum(of.values()) + 2 * each > 0
    assert list(step.program.programs) == list(stages[0].programs)


def test_passes_of_a_stage_are_those_of_the_simulation() -> None:
    """Without collectives, a rank computes so long."""
    step = captured("layers", "pp4", machine=MACHINE)
    for stage, work in zip(step.program.stages, step.pipeline.simulate().work, strict=True):
        seconds = autopar.price(stage.programs["micro"], MACHINE).seconds
        assert 0 < work <= 3 * seconds * (1 + 1e-9), "sums begin as zeros"
