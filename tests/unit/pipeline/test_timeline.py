"""The timeline against the longest path through the same ops."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.pipeline.timeline import Timeline


@pytest.mark.simulated
@settings(deadline=None)
@given(st.data())
def test_an_op_ends_at_its_longest_path(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    streams = [data.draw(st.integers(0, 2)) for _ in range(count)]
    durations = [data.draw(st.integers(0, 5)) for _ in range(count)]
    waits = [data.draw(st.sets(st.integers(0, k - 1))) if k else set() for k in range(count)]
    timeline = Timeline()
    ends: list[float] = []
    for k in range(count):
        ends.append(timeline.place(k, streams[k], durations[k], max((ends[w] for w in waits[k]), default=0.0)))

    def longest(k: int) -> int:
        before = [j for j in range(k) if j in waits[k] or streams[j] == streams[k]]
        return durations[k] + max(map(longest, before), default=0)

    assert ends == [longest(k) for k in range(count)]
    assert [(span.op, span.end - span.start) for span in timeline.spans] == list(enumerate(durations))
    assert timeline.makespan == max(ends)
    for stream in set(streams):
        own = list(timeline.on(stream))
        assert all(a.end <= b.start for a, b in itertools.pairwise(own))


def test_nothing_takes_no_time() -> None:
    assert Timeline().makespan == 0.0
