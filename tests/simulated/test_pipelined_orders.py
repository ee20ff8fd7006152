"""Every table that the verifier accepts gives the same numbers; all others are refused before anything runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from broken_schedules import FAULTS, disordered, passes, right, shaken
from equality import relative
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelined_steps import differences, made
from steps import run

from autopar.errors import ScheduleError
from autopar.pipeline import PipelineSchedule, Slot, Task, build
from autopar.pipeline.rows import rows
from autopar.runtime.running.messages import Message, SimulatedMessages
from autopar.runtime.running.slots import SlotRunner

RANDOM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def alike_or_refused(schedule: PipelineSchedule, name: str, tp: int = 1) -> bool:
    """Whether it ran, with the numbers of a single device; else it was refused in the verifier's words."""
    sizes = {"pp": schedule.ranks, **({"tp": tp} if tp > 1 else {})}
    layers = max(4, schedule.stages)
    if not passes(schedule):
        with pytest.raises(ScheduleError) as verified:
            schedule.verify()
        with pytest.raises(ScheduleError) as caught:
            made(name, sizes, schedule, schedule.batches, layers=layers)
        assert str(caught.value) == str(verified.value)
        return False
    step, alone, batches = made(name, sizes, schedule, schedule.batches, layers=layers, clip_norm=0.5)
    for k in range(2):
        assert relative(run(step, batches(k)), alone(**batches(k))[0]) <= 1e-9
    assert max(differences(step, alone).values()) <= 1e-9
    return True


NAMES = st.sampled_from(("skip", "shared", "streams"))


@pytest.mark.long
@settings(RANDOM, max_examples=6)
@given(schedule=disordered(), name=NAMES)
def test_random_orders(schedule: PipelineSchedule, name: str) -> None:
    """Of computations and messages, on random placements with unequal numbers of stages on a rank."""
    alike_or_refused(schedule, name)


@pytest.mark.long
@pytest.mark.sweep("test_random_orders draws a few")
@settings(RANDOM, max_examples=500)
@given(schedule=disordered(), name=NAMES, tp=st.sampled_from((1, 1, 2)))
def test_many_random_orders(schedule: PipelineSchedule, name: str, tp: int) -> None:
    alike_or_refused(schedule, name, tp)


@pytest.mark.long
@settings(RANDOM, max_examples=5)
@given(
    schedule=right(ranks=3, batches=4), name=NAMES, choose=st.randoms(use_true_random=False), times=st.integers(0, 2)
)
def test_changed_policies(schedule: PipelineSchedule, name: str, choose: random.Random, times: int) -> None:
    """Policies with messages early or late, with their releases or without, and then changed at random."""
    if schedule.ranks == 1:
        schedule = build("1f1b", 2, schedule.batches)
    for _ in range(times):
        schedule = shaken(schedule, choose)
    alike_or_refused(schedule, name)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_refused(fault: str) -> None:
    """Each rule of the verifier, when the step is made: nothing was captured, and no parameter has moved."""
    found = 0
    for policy in ("1f1b", "zb-h1"):
        schedule = build(policy, 2, 3)
        broken = FAULTS[fault](schedule, random.Random(0))
        if broken is not None:
            found += 1
            assert not alike_or_refused(broken[0], "layers")
    assert found


def test_rows_without_tasks() -> None:
    """Times are an order: empty rows between, and each slot in a row of its own, change nothing."""
    schedule = build("zb-h1", 2, 3)
    empty = tuple(type(slot)() for slot in schedule.slots[0])
    apart = [
        tuple(slot if at == rank else empty[rank] for at, slot in enumerate(row))
        for row in schedule.slots
        for rank in (1, 0)
    ]
    spread = [each for row in apart for each in (empty, row)]
    assert alike_or_refused(PipelineSchedule(tuple(spread), 3, schedule.rank_of), "skip")


def test_a_loaded_schedule_runs(tmp_path: object) -> None:
    for policy, suffix in (("zb-v", "json"), ("1f1b", "csv")):
        path = f"{tmp_path}/schedule.{suffix}"
        build(policy, 2, 3).save(path)
        assert alike_or_refused(PipelineSchedule.load(path), "shared")


@pytest.mark.parametrize("rank_of", [(0, 0, 1), (0, 1, 1, 1), (1, 0), (0, 1, 0, 1, 0)], ids=str)
def test_unequal_numbers_of_stages(rank_of: tuple[int, ...]) -> None:
    """Of micro-batches one after the other."""
    stages, batches = len(rank_of), 3
    order = [
        Task(kind, stage, batch)
        for batch in range(batches)
        for kind, along in (("FW", range(stages)), ("BW", reversed(range(stages))))
        for stage in along
    ]
    orders = [[Slot((task,)) for task in order if rank_of[task.stage] == rank] for rank in range(max(rank_of) + 1)]
    assert alike_or_refused(PipelineSchedule(rows(orders, rank_of), batches, rank_of), "streams")


@pytest.mark.parametrize("policy", ["1f1b", "zb-v"])
def test_nothing_is_kept_longer_than_the_schedule_says(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So memory does not grow with micro-batches: activations are dropped behind the last pass that reads them, and
    sends are waited for where their buffers are free."""
    under_way: dict[object, set[Task]] = {}
    left: dict[int, dict[object, object]] = {}
    most = {"sends": 0, "live": 0}
    start, wait, compute = SimulatedMessages.start, SimulatedMessages.wait, SlotRunner._compute

    def counted_start(self: SimulatedMessages, messages: Sequence[Message]) -> None:
        own = under_way.setdefault(self._rank, set())
        own |= {message.task for message in messages if message.is_send}
        most["sends"] = max(most["sends"], len(own))
        start(self, messages)

    def counted_wait(self: SimulatedMessages, task: object) -> Any:
        under_way.setdefault(self._rank, set()).discard(task)
        return (yield from wait(self, task))

    def counted_compute(self: SlotRunner, task: Task) -> Any:
        yield from compute(self, task)
        left[id(self)] = own = {key: kept for key, kept in self.rank.kept.items() if kept}
        assert all(name == "micro" for name, *_ in own)
        most["live"] = max(most["live"], len({batch for _, stage, batch in own if stage == task.stage} | {task.batch}))

    monkeypatch.setattr(SimulatedMessages, "start", counted_start)
    monkeypatch.setattr(SimulatedMessages, "wait", counted_wait)
    monkeypatch.setattr(SlotRunner, "_compute", counted_compute)
    found = []
    for count in (8, 24):
        most |= {"sends": 0, "live": 0}
        step, _, batches = made("layers", {"pp": 2}, policy, count)
        run(step, batches(0))
        assert not any(under_way.values()) and not any(left.values())
        found.append(dict(most))
    assert found[0] == found[1] and found[0]["live"] <= 4 and 0 < found[0]["sends"] <= 4
