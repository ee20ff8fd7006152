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
from autopar.notebook import InNotebook
from autopar.pipeline.dataflow import source
from autopar.pipeline.lowering import with_messages
from autopar.pipeline.memory import Held, memory
from autopar.pipeline.per_stage import Sizes, Times, durations, per_pair
from autopar.pipeline.picture import draw
from autopar.pipeline.schedule_table import Schedule, ScheduleTable
from autopar.pipeline.simulation_data import SimulationData
from autopar.pipeline.summary import summary
from autopar.pipeline.task import Slot, Task, other_end
from autopar.pipeline.timeline import Span, Stream, place
from autopar.pipeline.trace import save_trace
from autopar.pipeline.verify import checked


@dataclass(frozen=True)
class Simulation(InNotebook, SimulationData[Schedule]):
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
    run = _Run(schedule, times, at_once)
    for row in schedule.slots:
        for rank, slot in enumerate(row):
            if slot.tasks:
                run.send(rank, slot)
        for rank, slot in enumerate(row):
            if slot.tasks:
                run.compute(rank, slot)
    return Simulation(
        schedule, times, memory(schedule, sizes, held=held), tuple(map(tuple, run.computed)), tuple(run.sent),
        tuple(run.busy), tuple(run.exposed),
    )  # fmt: skip


class _Run:
    """The spans of a schedule's tasks so far.

    Attributes:
        computed, sent: the spans of computations, rank by rank, and of messages.
        free: stream → the end of its last span; a rank computes on a stream of its number.
        busy, exposed: for each rank: how long it computes, and how long it waits for messages on their way.
    """

    def __init__(self, schedule: ScheduleTable, times: Times, at_once: Collection[Task]) -> None:
        self.computed: list[list[Span]] = [[] for _ in range(schedule.ranks)]
        self.sent: list[Span] = []
        self.free: dict[Stream, float] = dict.fromkeys(range(schedule.ranks), 0.0)
        self.busy, self.exposed = [0.0] * schedule.ranks, [0.0] * schedule.ranks
        self._rank_of, self._at_once = schedule.rank_of, set(at_once)
        self._rendezvous, self._overlap = times.rendezvous, times.overlap
        self._durations = _durations(schedule, times)
        self._transfer = per_pair(times.transfer, schedule.stages, "transfer")
        # kind, receiving stage, micro-batch → ready to send, arrived
        self._arrived: dict[tuple[str, int, int], tuple[float, float]] = {}
        # the same → when the first of both ranks has reached the message
        self._reached: dict[tuple[str, int, int], float] = {}

    def send(self, rank: int, slot: Slot) -> None:
        """Place the messages of a slot; with a rendezvous, when the second of their ranks reaches them."""
        for task in slot.tasks:
            action = task.kind[1]
            if action == "S" or (action == "R" and self._rendezvous):
                send = task if action == "S" else other_end(task)
                message, ready = (send.kind[0], send.peer, send.batch), self.free[rank]
                if self._rendezvous:
                    if message not in self._reached:
                        self._reached[message] = ready
                        continue
                    ready = max(ready, self._reached.pop(message))
                link = (self._rank_of[send.stage], self._rank_of[send.peer])
                span = place(self.free, send, link, self._transfer[min(send.stage, send.peer)], ready)
                self.sent.append(span)
                self._arrived[message] = ready, span.end

    def compute(self, rank: int, slot: Slot) -> None:
        """Place the computations of a slot, one by one; a forward and a backward that overlap begin when both can."""
        computed = slot.compute
        together = self._overlap and {"FW", "BW"} <= {task.kind for task in computed}
        for tasks in [computed] if together else [(task,) for task in computed]:
            lasting = _overlapped(tasks, [self._durations[task.kind][task.stage] for task in tasks], self._overlap)
            waited = [self._waited(rank, task) for task in tasks]
            self.exposed[rank] += max(waits for _, waits in waited)
            ready = max(came for came, _ in waited)
            for task, duration in zip(tasks, lasting, strict=True):
                self.computed[rank].append(place(self.free, task, rank, duration, ready))
                self.busy[rank] += duration

    def _waited(self, rank: int, task: Task) -> tuple[float, float]:
        """Return when the message of a computation has come, and how long its rank waits for it on its way."""
        if source(task, self._rank_of) is None or task in self._at_once:
            return 0.0, 0.0
        sent, came = self._arrived[task.kind[0], task.stage, task.batch]
        return came, max(0.0, came - max(sent, self.free[rank]))


def _durations(schedule: ScheduleTable, times: Times) -> dict[str, list[float]]:
    """Return the durations of computations: kind → one for each stage."""
    forward, backward, weight = durations(times, schedule.stages)
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
