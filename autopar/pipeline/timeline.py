"""Place ops on streams, and compute when each begins and ends.

A stream runs its ops one after the other, in the order in which they are placed. An op begins when its stream is free
and everything that it waits for is ready; until it ends, it blocks later ops of its stream. Each op is placed after the
ops it waits for, so that its times are final at once: one addition and one comparison an op.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Stream = Hashable


class Span(NamedTuple):
    """One op, its stream, and when it begins and ends."""

    op: Any
    stream: Stream
    start: float
    end: float

    @property
    def link(self) -> tuple[int, int]:
        """The stream of a message: sender and receiver."""
        assert isinstance(self.stream, tuple)
        return self.stream


@dataclass
class Timeline:
    """The ops placed so far.

    Attributes:
        spans: all ops, in the order in which they were placed.
        free: stream → the end of its last op.
    """

    spans: list[Span] = field(default_factory=list)
    free: dict[Stream, float] = field(default_factory=dict)

    def place(self, op: Any, stream: Stream, duration: float, ready: float = 0.0) -> float:
        """Put an op at the end of a stream, not before ``ready``, and return when it ends."""
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
        """Iterate over the ops of one stream, in order."""
        return (span for span in self.spans if span.stream == stream)
