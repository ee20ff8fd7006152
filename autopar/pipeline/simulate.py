"""A schedule on paper: when each task begins and ends, how much of the time is lost, and what memory it takes.

Each rank computes one task after the other, each pair of ranks has a link in either direction, and messages travel while
ranks compute: a send begins when its rank has come to it and its link is free; a computation waits for its message, and nothing
before it does. What shares a slot is computed one after the other, and its results leave when all of it is done.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic

from autopar.errors import ScheduleError, shown
from autopar.gc_pause import collector_paused
from autopar.pipeline.dataflow import source
from autopar.pipeline.lowering import with_messages
from autopar.pipeline.memory import Memory, memory
from autopar.pipeline.per_stage import PAIRS, Sizes, Times, per_stage
from autopar.pipeline.schedule_table import Schedule
from autopar.pipeline.task import Task
from autopar.pipeline.verify import checked
from autopar.timeline import Span, Timeline


@dataclass(frozen=True)
class Simulation(Generic[Schedule]):
    """What came out.

    Attributes:
        schedule, times, memory: of what.
        computed: the spans of the computations, rank by rank: the stream is the rank.
        sent: the spans of the messages: the op is the send, the stream the pair of ranks.
        work: what each rank computes in all.
        exposed: how long each rank waited for messages on their way: less, by so much, if transfers took no time at all.
    """

    schedule: Schedule
    times: Times
    memory: Memory[Schedule] = field(repr=False)
    computed: tuple[tuple[Span, ...], ...] = field(repr=False)
    sent: tuple[Span, ...] = field(repr=False)
    work: tuple[float, ...]
    exposed: tuple[float, ...]

    def __str__(self) -> str:
        from autopar.pipeline.summary import summary

        return summary(self)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw it into an SVG, PNG or PDF; see ``autopar.pipeline.picture``."""
        from autopar.pipeline.picture import draw

        draw(self, path)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for Perfetto or chrome://tracing; see ``autopar.pipeline.trace``."""
        from autopar.pipeline.trace import save_trace

        save_trace(self, path)

    @cached_property
    def makespan(self) -> float:
        """From the first begin to the last end."""
        return max((own[-1].end for own in self.computed if own), default=0.0) - min((own[0].start for own in self.computed if own), default=0.0)

    @cached_property
    def span(self) -> float:
        """The longest time that a single rank takes from its first begin to its last end: what counts where steps overlap."""
        return max((own[-1].end - own[0].start for own in self.computed if own), default=0.0)

    @property
    def ideal(self) -> float:
        """The work of the busiest rank: m (F + B + W) where stages are alike."""
        return max(self.work)

    @property
    def bubble(self) -> float:
        """The time lost by makespan."""
        return self.makespan - self.ideal

    @property
    def bubble_rate(self) -> float:
        """``bubble`` over the makespan."""
        return self.bubble / self.makespan if self.makespan else 0.0

    @property
    def span_bubble(self) -> float:
        """The time lost by the longest span of a single rank."""
        return self.span - self.ideal

    @property
    def span_bubble_rate(self) -> float:
        """``span_bubble`` over the span."""
        return self.span_bubble / self.span if self.span else 0.0

    @property
    def peak(self) -> tuple[float, ...]:
        """The most memory in use, rank by rank."""
        return self.memory.peak


@collector_paused()
def simulate(schedule: Schedule, times: Times | None = None, sizes: Sizes | None = None, *, held: Collection[str] = (),
             at_once: Collection[Task] = ()) -> Simulation[Schedule]:  # fmt: skip
    """Run a schedule on paper; linear.

    Args:
        times, sizes: default: F = B = W = 1, transfers take no time; an activation is one, messages are nothing.
        held: passes whose send buffers are kept to the end, as for ``memory``.
        at_once: computations that do not wait for what comes from another rank. No schedule can be run so; some published
            figures were.
    """
    times = Times() if times is None else times
    if not isinstance(times, Times):
        raise TypeError(f"times is a Times, not {shown(times)}")
    if wrong := [task for task in at_once if not isinstance(task, Task)]:
        raise ScheduleError(f"at_once is of tasks of the schedule, not {shown(wrong[0])}")
    schedule = with_messages(checked(schedule))
    stages, rank_of = schedule.stages, schedule.rank_of
    forward, backward, weight = (per_stage(getattr(times, name), stages, name) for name in ("forward", "backward", "weight"))
    transfer = per_stage(times.transfer, stages - 1, "transfer", PAIRS) if stages > 1 else []
    if not schedule.is_split:
        backward = [b + w for b, w in zip(backward, weight, strict=True)]
    if schedule.recompute:
        backward = [b + f for b, f in zip(backward, forward, strict=True)]
    ranks, links = Timeline(), Timeline()
    busy = [0.0] * schedule.ranks
    exposed = [0.0] * schedule.ranks
    arrived: dict[tuple[str, int, int], tuple[float, float]] = {}  # kind, receiving stage, micro-batch → made, arrived
    at_once = set(at_once)
    for row in schedule.slots:
        for rank, slot in enumerate(row):
            for task in slot.tasks:
                if task.kind[1] == "S":
                    made = ranks.free.get(rank, 0.0)
                    end = links.place(task, (rank, rank_of[task.peer]), transfer[min(task.stage, task.peer)], made)
                    arrived[task.kind[0], task.peer, task.batch] = made, end
        for rank, slot in enumerate(row):
            for task in slot.tasks:
                kind, stage, batch, _ = task
                if kind[1] == "W":
                    if kind == "FW":
                        duration = forward[stage]
                    elif kind == "WW":
                        duration = weight[stage]
                    else:
                        duration = backward[stage]
                    ready = 0.0
                    if source(task, rank_of) is not None and task not in at_once:
                        made, ready = arrived[kind[0], stage, batch]
                        exposed[rank] += max(0.0, ready - max(made, ranks.free.get(rank, 0.0)))
                    ranks.place(task, rank, duration, ready)
                    busy[rank] += duration
    computed: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    for span in ranks.spans:
        computed[span.stream].append(span)  # type: ignore[index]
    return Simulation(schedule, times, memory(schedule, sizes, held=held), tuple(map(tuple, computed)), tuple(links.spans), tuple(busy), tuple(exposed))
