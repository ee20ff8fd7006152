"""Place ops on streams, and compute when each begins and ends.

A stream runs its ops one after the other, in the order in which they are placed. An op begins when its stream is free
and everything that it waits for is ready; until it ends, it blocks later ops of its stream. Each op is placed after the
ops it waits for, so that its times are final at once: one addition and one comparison an op.
"""

from __future__ import annotations

from collections.abc import Hashable
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


def place(free: dict[Stream, float], op: Any, stream: Stream, duration: float, ready: float) -> Span:
    """Put an op at the end of a stream, not before ``ready``, and return its span.

    Args:
        free: stream → the end of its last op; brought up to date.
    """
    start = free.get(stream, 0.0)
    if ready > start:
        start = ready
    end = free[stream] = start + duration
    return Span(op, stream, start, end)
