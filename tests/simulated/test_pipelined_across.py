"""Pipelined steps whose last reductions or gathers cross the end of a step: the numbers of a single device."""

from __future__ import annotations

from typing import Any

import pytest
import steps
import torch
from equality import relative
from pipelined_steps import MESHES, differences, made

SWEEP = pytest.mark.sweep("what crosses is decided in the same way")
CASES = [
    ("shared", "pp2 dp2", "1f1b", {}),  # also the sum of a tied weight, which is then sent home
    ("shared", "pp2 dp2", "zb-v", {"zero": 1, "clip_norm": 0.5}),  # gathers cross
    ("penalized", "pp2 dp2", "1f1b", {}),  # gradients of parameters that the last stage does not have
    ("normed", "pp2 dp2", "1f1b", {"returns": "outputs", "rows": 8}),  # gradients that are not reduced, and buffers
    pytest.param("layers", "pp2 tp2", "gpipe", {"ema": 0.9}, marks=SWEEP),
    pytest.param("shared", "pp2 dp2", "interleaved-1f1b", {"zero": 2}, marks=SWEEP),
    pytest.param("streams", "pp2 dp2", "zb-h1", {"zero": 3}, marks=SWEEP),
]


@pytest.mark.parametrize(("name", "mesh", "policy", "options"), CASES)
def test_steps(name: str, mesh: str, policy: str, options: dict[str, Any]) -> None:
    step, alone, batches = made(name, MESHES[mesh], policy, 3, layers=8, across=True, **options)
    for k in range(3):
        assert relative(steps.run(step, batches(k)), alone(**batches(k))[0]) <= 1e-9
        if k == 1:
            step.finish()  # the next step begins without anything under way
    step.finish()
    assert max(differences(step, alone).values()) <= 1e-9
    crosses = "dp" in mesh and options.get("zero") != 3
    ending = "turn" if crosses else "update"
    assert {part.name.split(":")[0] for part in step.communication.parts} >= {"stage 0", f"stage 1 {ending}"}
    assert step.pipeline.seconds > step.pipeline.simulate().makespan
    assert ("finish:" in str(step.local(0))) == ("turn" in step.local(0).programs) == crosses


def test_the_timetable() -> None:
    step, _, batches = made("layers", MESHES["pp2 dp2"], "1f1b", 2, across=True)
    steps.run(step, batches(0))
    assert [text for text in str(step.timetable).splitlines() if "@" not in text and "FW" not in text] == [
        "timetable of 2 micro-batches, 2 stages, 1f1b",
        "ranks 0 1, stage 0", "  turn.finish takes started", "  sums 0 takes inputs hands totals",
        "  sums 1 takes inputs hands totals", "  count 0 takes inputs totals hands counts",
        "  turn.last takes sums hands started",
        "ranks 2 3, stage 1", "  turn.finish takes started", "  sums 0 takes inputs hands totals",
        "  sums 1 takes inputs hands totals", "  count 0 takes inputs totals hands counts",
        "  turn.last takes sums hands started",
    ]  # fmt: skip


def test_a_program_that_there_is_not() -> None:
    step, _, batches = made("layers", MESHES["pp2 dp2"], "1f1b", 2, across=True)
    step.capture(**batches(0))
    with pytest.raises(KeyError, match=r"no program 'update'; there are sums, count, micro, turn"):
        step.local(0)["update"]


def test_nothing_to_cross() -> None:
    """Without data parallelism no gradient is reduced; the step says so and ends complete."""
    step, alone, batches = made("layers", MESHES["pp4"], "1f1b", 2, across=True)
    assert relative(steps.run(step, batches(0)), alone(**batches(0))[0]) <= 1e-9
    assert "turn" not in step.local(0).programs
    assert "nothing crosses the end of a step: no gradient is reduced behind the last micro-batch" in str(step.reports)
    assert max(differences(step, alone).values()) <= 1e-9


@pytest.mark.parametrize("options", [{"zero": 1, "clip_norm": 0.5}, {"across": True}], ids=str)
def test_state_in_host_memory(options: dict[str, Any]) -> None:
    """``offload`` has the bits of a step without, and the state is not in the memory of a rank."""
    found = []
    for offload in (False, True):
        step, _, batches = made("shared", MESHES["pp2 dp2"], "1f1b", 3, layers=8, offload=offload, **options)
        for k in range(3):
            steps.run(step, batches(k))
        step.finish()
        found.append((step.memory(0).held, [parameter.detach() for parameter in step.parallel.parameters()]))
    (held, wanted), (held_here, parameters) = found
    assert all(torch.equal(a, b) for a, b in zip(parameters, wanted, strict=True))
    assert held_here < 0.7 * held
