"""The schedule of a step: of a policy's name, or the user's own; what does not fit is refused with the remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar import Mesh
from autopar.errors import ScheduleError
from autopar.pipeline import POLICIES, PipelineSchedule, build
from autopar.pipeline.lowering import with_frees
from autopar.step.options import StepOptions
from autopar.step.pipelined.schedules import schedule_of

MESH = Mesh(pp=4, tp=2)


def options(schedule: Any, microbatches: int = 8, chunks: int | None = None) -> StepOptions:
    return StepOptions(schedule=schedule, microbatches=microbatches, chunks=chunks)


@pytest.mark.parametrize("name", POLICIES)
def test_a_name(name: str) -> None:
    """With messages and the rows in which buffers are free; of all micro-batches."""
    made = schedule_of(options(name), MESH)
    assert made == with_frees(build(name, 4, 8)) and made.has_messages and made.ranks == 4 and made.batches == 8
    assert any(slot.free for row in made.slots for slot in row)
    assert schedule_of(options(name), MESH).stages == 4 * POLICIES[name].default


def test_chunks_go_to_the_policy() -> None:
    assert schedule_of(options("interleaved-1f1b", chunks=3), MESH).stages == 12


@pytest.mark.parametrize("messages", [False, True])
def test_a_schedule_of_the_user(messages: bool) -> None:
    """It is verified, and gets messages and releases where it has none."""
    made = build("zb-h1", 4, 8, messages=messages)
    again = PipelineSchedule(made.slots, made.batches, made.rank_of)
    assert schedule_of(options(again), MESH).slots == with_frees(made).slots


def test_no_schedule() -> None:
    with pytest.raises(ValueError) as caught:
        schedule_of(options(None), MESH)
    assert str(caught.value) == (
        f"the mesh ({MESH}) has 4 stages along pp, and train_step has no schedule: give "
        f'schedule="1f1b", another of {", ".join(POLICIES)}, or an autopar.pipeline.PipelineSchedule'
    )


def test_no_such_policy() -> None:
    with pytest.raises(ScheduleError, match="1f1"):
        schedule_of(options("1f1"), MESH)


def test_no_schedule_at_all() -> None:
    with pytest.raises(TypeError, match=r"^schedule=3 is neither the name of a policy \(gpipe, .*\), nor a Pipeline"):
        schedule_of(options(3), MESH)


def test_chunks_with_a_schedule() -> None:
    with pytest.raises(ValueError, match=r"^chunks=2 goes with the name of a policy; this schedule has 1$"):
        schedule_of(options(build("1f1b", 4, 8), chunks=2), MESH)


def test_chunks_that_the_policy_does_not_have() -> None:
    with pytest.raises(ScheduleError, match="zb-v"):
        schedule_of(options("zb-v", chunks=3), MESH)


def test_other_ranks() -> None:
    with pytest.raises(ScheduleError, match=r"^the schedule has 2 ranks, and the mesh \(.*\) has pp=4$"):
        schedule_of(options(build("1f1b", 2, 8)), MESH)


def test_other_micro_batches() -> None:
    with pytest.raises(ScheduleError) as caught:
        schedule_of(options(build("1f1b", 4, 4)), MESH)
    assert str(caught.value) == "the schedule has 4 micro-batches, and microbatches=8: give microbatches=4"


def test_a_wrong_table() -> None:
    """In the verifier's words."""
    made = build("1f1b", 4, 8, messages=False)
    first, *rest = made.slots
    wrong = replace(PipelineSchedule((*rest, first), 8, made.rank_of), name="")
    with pytest.raises(ScheduleError) as caught:
        schedule_of(options(wrong), MESH)
    with pytest.raises(ScheduleError) as verified:
        wrong.verify()
    assert str(caught.value) == str(verified.value)
