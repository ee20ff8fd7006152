"""Steps on stages that are recorded, and what of them equals the events of the schedule."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from equality import relative
from pipelined_steps import MESHES, differences, made
from steps import run
from torch import distributed

from autopar.pipeline import POLICIES, PipelineSchedule, Task
from autopar.runtime.recording import recording

ENDS = {"R": 0, "W": 1, "S": 2}  # action → its place among the events of a pass


def events_of(schedule: PipelineSchedule, task: Task) -> tuple[int, int]:
    """The events that the slot of a task waits for and records."""
    comm, at = schedule.events(task.batch, task.stage, task.of).comm, 2 * ENDS[task.action]
    return comm[at], comm[at + 1]


def check_events(schedule: PipelineSchedule, position: int, executed: list[Task]) -> None:
    """A rank runs the tasks of its slots in their order, and so each slot behind the event that it waits for."""
    slots = [row[position] for row in schedule.slots if row[position].tasks]
    assert executed == [task for slot in slots for task in (*slot.messages, *slot.compute)]
    events = [events_of(schedule, task) for task in executed]
    assert [pair for pair, _ in itertools.groupby(events)] == [(k - 1, k) for k in range(len(slots))]


def layers_for(mesh: str, policy: str) -> int:
    return max(4, MESHES[mesh]["pp"] * POLICIES[policy].default)


def recorded(cases: list[tuple[str, str, str]], folder: str) -> None:
    """On each rank: a step between others has their numbers, and its events are those of the schedule."""
    for name, mesh, policy in cases:
        options: dict[str, Any] = {"layers": layers_for(mesh, policy), "clip_norm": 0.5}
        step, alone, batches = made(name, MESHES[mesh], policy, 3, **options)
        run(step, batches(0)), alone(**batches(0))
        found = step.timeline(**batches(1))
        alone(**batches(1))
        assert relative(run(step, batches(2)), alone(**batches(2))[0]) <= 1e-9
        assert max(differences(step, alone).values()) <= 1e-9
        check_timeline(found, step, folder)
        step.parallel.close()


def check_timeline(found: Any, step: Any, folder: str) -> None:
    schedule, count = step.pipeline.schedule, distributed.get_world_size()
    sent: dict[Task, float] = {}
    for rank, slots in enumerate(found.slots):
        check_events(schedule, schedule.stages_of.index(found.ranks[rank].stages), found.executed(rank))
        assert all(a.end <= b.begin for a, b in itertools.pairwise(slots)), "a rank does one thing after the other"
        assert all(0 <= slot.begin <= slot.end <= found.seconds[rank] for slot in slots)
        assert slots[-1].words == "the update"
        assert found.exposed[rank] == sum(slot.end - slot.begin for slot in slots if slot.kind == "wait")
        for slot in slots:
            for task in slot.tasks if slot.kind == "start" else ():
                sent[task] = min(slot.begin, sent.get(task, slot.begin))  # by the first rank of the stage
    for slots in found.slots:  # on one clock, nothing is received before it is sent
        for slot in slots:
            for task in slot.tasks if slot.kind == "wait" else ():
                if task.action == "R":
                    send = Task(f"{task.of}S", task.peer, task.batch, task.stage)
                    assert slot.end >= sent[send] - 1e-9
    path = Path(folder, f"{distributed.get_rank()}.json")
    found.save(path)
    names = [e["args"]["name"] for e in found.trace()["traceEvents"] if e["name"] == "process_name"]
    assert len(names) == schedule.ranks + count and path.stat().st_size > 1000
    assert "simulated" in str(found) and f"rank {count - 1}" in str(found)
    gathered = [None] * count
    distributed.all_gather_object(gathered, found.slots)
    assert all(other == found.slots for other in gathered), "all ranks have one timeline"


def recorded_events(name: str, mesh: str, policy: str, **options: Any) -> dict[int, list[Task]]:
    """Rank → the tasks that it has executed in a simulated step; they are the events of the schedule."""
    step, alone, batches = made(name, MESHES[mesh], policy, 3, layers=layers_for(mesh, policy), **options)
    with recording() as recorder:
        assert relative(run(step, batches(0)), alone(**batches(0))[0]) <= 1e-9
    found = {}
    for rank, slots in recorder.slots.items():
        found[rank] = [task for slot in slots if slot.kind != "wait" for task in slot.tasks]
        check_events(step.pipeline.schedule, step.parallel.mesh.coordinates(rank)["pp"], found[rank])
    assert sorted(found) == list(step.parallel.mesh.ranks)
    return found
