"""Streams, and when each op on them begins and ends.

A stream runs its ops one after the other, in the order in which they are placed; an op begins when its stream is free and all
that it waits for is there, and it blocks what comes after it on its own stream. Ops are placed in an order in which each comes
after those it waits for, so that its times are final at once: one addition and one comparison an op.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Stream = Hashable


class Span(NamedTuple):
    """One op: what it is, on which stream, from when to when."""

    op: Any
    stream: Stream
    start: float
    end: float


@dataclass
class Timeline:
    """What has been placed so far.

    Attributes:
        spans: of all ops, as they were placed.
        free: when each stream is done with what was placed on it.
    """

    spans: list[Span] = field(default_factory=list)
    free: dict[Stream, float] = field(default_factory=dict)

    def place(self, op: Any, stream: Stream, duration: float, ready: float = 0.0) -> float:
        """Put an op at the end of a stream, not before ``ready``; when it ends."""
        start = self.free.get(stream, 0.0)
        if ready > start:
            start = ready
        end = self.free[stream] = start + duration
        self.spans.append(Span(op, stream, start, end))
        return end

    @property
    def makespan(self) -> float:
        return max(self.free.values(), default=0.0)

    def on(self, stream: Stream) -> Iterator[Span]:
        """The ops of one stream, in their order."""
        return (span for span in self.spans if span.stream == stream)
