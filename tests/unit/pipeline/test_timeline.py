"""The timeline against the longest path through the same ops."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.pipeline.timeline import Span, Stream, place


@pytest.mark.simulated
@settings(deadline=None)
@given(st.data())
def test_an_op_ends_at_its_longest_path(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    streams = [data.draw(st.integers(0, 2)) for _ in range(count)]
    durations = [data.draw(st.integers(0, 5)) for _ in range(count)]
    waits = [data.draw(st.sets(st.integers(0, k - 1))) if k else set() for k in range(count)]
    free: dict[Stream, float] = {}
    spans: list[Span] = []
    for k in range(count):
        ready = max((spans[w].end for w in waits[k]), default=0.0)
        spans.append(place(free, k, streams[k], durations[k], ready))

    def longest(k: int) -> int:
        before = [j for j in range(k) if j in waits[k] or streams[j] == streams[k]]
        return durations[k] + max(map(longest, before), default=0)

    assert [span.end for span in spans] == [longest(k) for k in range(count)]
    assert [(span.op, span.end - span.start) for span in spans] == list(enumerate(durations))
    for stream in set(streams):
        own = [span for span in spans if span.stream == stream]
        assert all(a.end <= b.start for a, b in itertools.pairwise(own)) and own[-1].end == free[stream]
