"""Simulate a schedule: compute when each task begins and ends, how much time is lost, and how much memory is used.

Each rank computes one task after the other. Each pair of ranks has a link in either direction, and messages travel
while ranks compute. A send begins when its rank has reached it and its link is free; with ``Times.rendezvous``, when
both ranks have reached it. A computation waits for its message; nothing before the computation waits for it. The tasks
of one slot are computed one after the other, and their results are sent when all of them are done. With
``Times.overlap``, a forward and a backward of one slot take less than one after the other, as in DualPipe.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autopar.errors import ScheduleError, shown
from autopar.gc_pause import gc_paused
from autopar.pipeline.dataflow import source
from autopar.pipeline.lowering import with_messages
from autopar.pipeline.memory import Held, memory
from autopar.pipeline.per_stage import PAIRS, Sizes, Times, per_stage
from autopar.pipeline.picture import draw
from autopar.pipeline.schedule_table import Schedule, ScheduleTable
from autopar.pipeline.simulation_data import SimulationData
from autopar.pipeline.summary import summary
from autopar.pipeline.task import Task, other_end
from autopar.pipeline.timeline import Span, Timeline
from autopar.pipeline.trace import save_trace
from autopar.pipeline.verify import checked


@dataclass(frozen=True)
class Simulation(SimulationData[Schedule]):
    """The result of ``simulate``: spans of computations and messages, and memory.

    The attributes are those of ``SimulationData``.
    """

    def __str__(self) -> str:
        return summary(self)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw the simulation into an SVG, PNG or PDF; see ``autopar.pipeline.picture``."""
        draw(self, path)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for Perfetto or chrome://tracing; see ``autopar.pipeline.trace``."""
        save_trace(self, path)


@gc_paused()
def simulate(schedule: Schedule, times: Times | None = None, sizes: Sizes | None = None, *, held: Collection[Held] = (),
             at_once: Collection[Task] = ()) -> Simulation[Schedule]:  # fmt: skip
    """Simulate a schedule. Linear in its tasks.

    Args:
        times: the durations of tasks. Default: F = B = W = 1, and transfers take no time.
        sizes: the memory that tasks keep. Default: an activation has size 1, and messages have size 0.
        held: passes whose send buffers are kept to the end, as for ``memory``.
        at_once: computations that do not wait for messages. No real run can do this, but some published figures assume
            it.

    Raises:
        TypeError: ``times`` is not a ``Times``, or ``sizes`` not a ``Sizes``.
        ScheduleError: the schedule is invalid, or the number of times or sizes is not that of stages.
    """
    times = Times() if times is None else times
    if not isinstance(times, Times):
        raise TypeError(f"times is a Times, not {shown(times)}")
    if wrong := [task for task in at_once if not isinstance(task, Task)]:
        raise ScheduleError(f"at_once is of tasks of the schedule, not {shown(wrong[0])}")
    schedule = with_messages(checked(schedule))
    stages, rank_of = schedule.stages, schedule.rank_of
    durations = _durations(schedule, times)
    transfer = per_stage(times.transfer, stages - 1, "transfer", PAIRS) if stages > 1 else []
    ranks, links = Timeline(), Timeline()
    busy = [0.0] * schedule.ranks
    exposed = [0.0] * schedule.ranks
    # kind, receiving stage, micro-batch → ready to send, arrived
    arrived: dict[tuple[str, int, int], tuple[float, float]] = {}
    # kind, receiving stage, micro-batch → when the first of both ranks has reached the message
    reached: dict[tuple[str, int, int], float] = {}
    at_once = set(at_once)
    for row in schedule.slots:
        for rank, slot in enumerate(row):
            for task in slot.tasks:
                if task.kind[1] == "W" or (task.kind[1] == "R" and not times.rendezvous):
                    continue
                send = task if task.kind[1] == "S" else other_end(task)
                message, ready = (send.kind[0], send.peer, send.batch), ranks.free.get(rank, 0.0)
                if times.rendezvous:
                    if message not in reached:
                        reached[message] = ready
                        continue
                    ready = max(ready, reached.pop(message))
                link = (rank_of[send.stage], rank_of[send.peer])
                arrived[message] = ready, links.place(send, link, transfer[min(send.stage, send.peer)], ready)
        for rank, slot in enumerate(row):
            tasks = slot.compute
            lasting = [durations[task.kind][task.stage] for task in tasks]
            if together := bool(times.overlap) and {"FW", "BW"} <= {task.kind for task in tasks}:
                lasting = _overlapped(tasks, lasting, times.overlap)
            for k, (task, duration) in enumerate(zip(tasks, lasting, strict=True)):
                ready = waits = 0.0
                for reader in tasks if together and k == 0 else (task,):
                    if source(reader, rank_of) is not None and reader not in at_once:
                        computed_at, came = arrived[reader.kind[0], reader.stage, reader.batch]
                        waits = max(waits, came - max(computed_at, ranks.free.get(rank, 0.0)))
                        ready = max(ready, came)
                exposed[rank] += waits
                ranks.place(task, rank, duration, ready)
                busy[rank] += duration
    computed: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    for span in ranks.spans:
        assert isinstance(span.stream, int)  # a rank
        computed[span.stream].append(span)
    return Simulation(
        schedule,
        times,
        memory(schedule, sizes, held=held),
        tuple(map(tuple, computed)),
        tuple(links.spans),
        tuple(busy),
        tuple(exposed),
    )


def _durations(schedule: ScheduleTable, times: Times) -> dict[str, list[float]]:
    """Return the durations of computations: kind → one for each stage."""
    forward, backward, weight = (
        per_stage(getattr(times, name), schedule.stages, name) for name in ("forward", "backward", "weight")
    )
    if not schedule.is_split:
        backward = [b + w for b, w in zip(backward, weight, strict=True)]
    if schedule.recompute:
        backward = [b + f for b, f in zip(backward, forward, strict=True)]
    return {"FW": forward, "BW": backward, "WW": weight}


def _overlapped(tasks: Sequence[Task], lasting: Sequence[float], overlap: float) -> list[float]:
    """Return the durations of the tasks of a slot, from whose end the hidden time is taken."""
    forward = sum(duration for task, duration in zip(tasks, lasting, strict=True) if task.kind == "FW")
    hidden = overlap * min(forward, sum(lasting) - forward)
    left = []
    for duration in reversed(lasting):
        part = min(duration, hidden)
        hidden -= part
        left.append(duration - part)
    return left[::-1]
