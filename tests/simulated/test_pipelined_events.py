"""The events of a step on stages, as executed, are those of its schedule: in the order of each policy."""

from __future__ import annotations

import pytest
from pipelined_steps import MESHES, made
from pipelined_timelines import check_events, layers_for, recorded_events

from autopar.pipeline import POLICIES, Task
from autopar.runtime.recording import RecordedSlot, recording
from autopar.runtime.running.messages import RecordedMessages, SimulatedMessages, recorded
from autopar.scheduling.op import COMPUTE
from autopar.step.reports.rank_record import RankRecord, Recording, on_one_clock
from autopar.step.reports.timeline import StepTimeline


@pytest.mark.parametrize("policy", POLICIES)
def test_events_as_executed(policy: str) -> None:
    recorded_events("layers", "pp2 tp2" if policy == "1f1b" else "pp3", policy)


def test_collectives_inside_of_passes() -> None:
    assert all(recorded_events("shared", "pp2 dp2", "1f1b", zero=3).values())


def test_nothing_is_recorded_by_other_steps() -> None:
    messages = SimulatedMessages(0, {})
    assert recorded(messages, 0) is messages
    with recording():
        assert isinstance(recorded(messages, 0), RecordedMessages)


def slot(text: str, kind: str, begin: float, end: float, *tasks: Task) -> RecordedSlot:
    return RecordedSlot(text, kind, begin, end, tasks)  # type: ignore[arg-type]


def test_one_clock() -> None:
    """The ranks of a machine share its clock; those of another one begin when they are ready."""
    ready = [("one", 10.0), ("one", 10.5), ("two", 700.0)]
    made = {rank: [Recording(*at, [], [slot("a", "compute", 1.0, 2.0)])] for rank, at in enumerate(ready)}
    found = on_one_clock(made, dict.fromkeys(range(3), ()))
    assert [(s.begin, s.end) for rank in found for (s,) in rank.slots] == [(1.0, 2.0), (1.5, 2.5), (1.5, 2.5)]


def test_table_and_trace() -> None:
    step, _, batches = made("layers", {"pp": 2}, "1f1b", 1)
    step.capture(**batches(0))
    forward, send, receive, back = Task("FW", 0, 0), Task("FS", 0, 0, 1), Task("FR", 1, 0, 0), Task("BW", 1, 0)
    slots = (
        (slot("", "compute", 0.001, 0.003, forward), slot("", "start", 0.003, 0.004, send),
         slot("", "wait", 0.005, 0.006, send), slot("the update of stage 0", "compute", 0.006, 0.008)),
        (slot("", "start", 0.001, 0.002, receive), slot("", "wait", 0.002, 0.005, receive),
         slot("", "compute", 0.005, 0.009, back)),
    )  # fmt: skip
    records = tuple(RankRecord(rank, (rank,), ((),), (own,)) for rank, own in enumerate(slots))
    found = StepTimeline(step.communication, step.pipeline.simulate(), records)
    assert found.seconds == (0.008, 0.009) and found.exposed == pytest.approx((0.001, 0.003))
    assert found.executed(0) == [forward, send] and found.executed(1) == [receive, back]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in str(found).splitlines() if "rank" in line]
    assert rows == [
        ["rank 0", "0", "8.000", "2.000", "2.000", "0.000", "0.000", "0.000", "1"],
        ["rank 1", "1", "9.000", "8.000", "0.000", "4.000", "0.000", "3.000", "1"],
    ]
    events = found.trace()["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == ["simulated stage 0", "simulated stage 1", "rank 0, stage 0", "rank 1, stage 1"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    computed = [(names[e["pid"]], e["name"]) for e in events
                if e["ph"] == "X" and threads[e["pid"], e["tid"]] == COMPUTE and "rank" in names[e["pid"]]]  # fmt: skip
    assert computed == [
        ("rank 0, stage 0", "FW00"), ("rank 0, stage 0", "FS00"), ("rank 0, stage 0", "wait FS00"),
        ("rank 0, stage 0", "the update of stage 0"), ("rank 1, stage 1", "FR00"),
        ("rank 1, stage 1", "wait FR00"), ("rank 1, stage 1", "BW00"),
    ]  # fmt: skip
    under_way = [(e["name"], threads[e["pid"], e["tid"]], e["ts"]) for e in events if e["ph"] in "be"]
    assert under_way == [("FS00", "to stage 1", 3000.0), ("FS00", "to stage 1", 6000.0),
                         ("FR00", "from stage 0", 1000.0), ("FR00", "from stage 0", 5000.0)]  # fmt: skip


def test_another_order_is_found() -> None:
    """Else the other tests would test nothing."""
    step, _, batches = made("layers", MESHES["pp3"], "1f1b", 3, layers=layers_for("pp3", "1f1b"))
    step.capture(**batches(0))
    schedule = step.pipeline.schedule
    tasks = [task for row in schedule.slots for task in (*row[1].messages, *row[1].compute)]
    check_events(schedule, 1, tasks)
    with pytest.raises(AssertionError):
        check_events(schedule, 1, [tasks[1], tasks[0], *tasks[2:]])
