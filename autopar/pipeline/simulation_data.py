"""Store the result of a simulation, and derive makespan, bubble and peak from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic

from autopar.pipeline.memory import Memory
from autopar.pipeline.per_stage import Times
from autopar.pipeline.schedule_table import Schedule
from autopar.pipeline.timeline import Span


@dataclass(frozen=True)
class SimulationData(Generic[Schedule]):
    """The fields of a ``Simulation`` and its queries, which the summary, the picture and the trace use.

    Attributes:
        schedule: the schedule, with messages.
        times, memory: its times and its memory.
        computed: the spans of the computations, rank by rank: the stream is the rank.
        sent: the spans of the messages: the op is the send, the stream the pair of ranks.
        work: the time that each rank computes, in the unit of ``times``.
        exposed: the time that each rank waits for messages in transit, which it would not wait if transfers took no
            time.
    """

    schedule: Schedule
    times: Times
    memory: Memory[Schedule] = field(repr=False)
    computed: tuple[tuple[Span, ...], ...] = field(repr=False)
    sent: tuple[Span, ...] = field(repr=False)
    work: tuple[float, ...]
    exposed: tuple[float, ...]

    @cached_property
    def makespan(self) -> float:
        """The time from the first begin to the last end."""
        busy = [spans for spans in self.computed if spans]
        return max((spans[-1].end for spans in busy), default=0.0) - min(
            (spans[0].start for spans in busy), default=0.0
        )

    @cached_property
    def span(self) -> float:
        """The longest time of one rank from its first begin to its last end.

        It is the length of a step if steps overlap.
        """
        return max((spans[-1].end - spans[0].start for spans in self.computed if spans), default=0.0)

    @property
    def ideal(self) -> float:
        """The work of the busiest rank: m (F + B + W) if stages are alike."""
        return max(self.work)

    @property
    def bubble(self) -> float:
        """The time lost according to the makespan."""
        return self.makespan - self.ideal

    @property
    def bubble_rate(self) -> float:
        """``bubble`` over the makespan."""
        return self.bubble / self.makespan if self.makespan else 0.0

    @property
    def span_bubble(self) -> float:
        """The time lost according to the longest span of a single rank."""
        return self.span - self.ideal

    @property
    def span_bubble_rate(self) -> float:
        """``span_bubble`` over the span."""
        return self.span_bubble / self.span if self.span else 0.0

    @property
    def peak(self) -> tuple[float, ...]:
        """The most memory in use, rank by rank."""
        return self.memory.peak
