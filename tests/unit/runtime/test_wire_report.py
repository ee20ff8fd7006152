"""Late seconds, reports and the compute clock of an emulated wire."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.runtime.wire.pacing import Pacer
from autopar.runtime.wire.report import Counts, Record, WireReport
from autopar.runtime.wire.work import Alarms


def record(begin: float, end: float, arrived: float) -> Record:
    return Record("0", "allreduce", 8, begin, end, arrived)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8))
def test_late_spans_that_overlap_count_once(spans: list[tuple[int, int]]) -> None:
    counts = Counts()
    for floor, end in spans:
        counts.late(floor, end)
        counts.report()  # changes nothing
    assert counts.report().late == len({second for floor, end in spans for second in range(floor, end)})


def test_late_transfers_are_counted() -> None:
    counts = Counts()
    counts.finished(record(1, 3, 2))  # on time
    counts.finished(record(3, 5, 7))  # 2 late
    counts.finished(record(5, 6, 8))  # late, and 1 more
    counts.finished(record(5, 6, 20), since=19)  # looked at late
    report = counts.report()
    assert (report.transfers, report.bytes, report.charged) == (4, 32, 6.0)
    assert (report.late, report.transfers_late) == (4.0, 3)
    assert [one.end for one in counts.records] == [3, 5, 6, 6]
    counts.reset()
    assert counts.report().transfers == 0
    assert not counts.records


def test_a_report_says_that_it_is_void() -> None:
    good = WireReport(1.0, 3, 3_000_000, 0.5, 0.02, 1)
    assert good.void == ""
    assert str(good) == "wire: 3 transfers, 3.000 MB, 500.000 ms charged; 1 late, 20.000 of 1000.000 ms"
    late = WireReport(1.0, 3, 3_000_000, 0.5, 0.021, 1)
    assert late.void.startswith("2.1 % of the time was late, more than 2 %: this machine is too slow for this wire")
    assert str(late).endswith(f"\nvoid: {late.void}")
    assert "nothing has travelled over the wire" in WireReport(1.0, 0, 0, 0.0, 0.0, 0).void


class Hands:
    """A clock that sleeps as long as it is told to, and too long by ``over``."""

    def __init__(self, over: float = 0.0) -> None:
        self.time, self.over = 0.0, over

    def __call__(self) -> float:
        return self.time

    def sleep(self, until: float) -> None:
        self.time = until + self.over


def test_a_segment_ends_no_earlier_than_its_floor() -> None:
    clock, counts = Hands(), Counts()
    pacer = Pacer({"F": 3.0}, counts, clock, clock.sleep)
    clock.time = 10.0
    pacer.begin()
    clock.time = 11.0
    pacer.computed("F")
    assert clock.time == 13.0
    clock.time = 18.0  # real computing took 5 where the profile says 2
    pacer.computed(2.0)
    assert clock.time == 18.0
    pacer.computed(1)
    assert clock.time == 19.0
    assert counts.report().late == 3.0


def test_sleeping_too_long_does_not_add_up() -> None:
    clock = Hands(over=0.25)
    pacer = Pacer({}, Counts(), clock, clock.sleep)
    for _ in range(8):
        pacer.computed(1.0)
    assert clock.time == 8.25


def test_bad_durations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pace: the duration of 'F' is a number of seconds ≥ 0, not -1"):
        Pacer({"F": -1}, Counts())
    pacer = Pacer({"forward": 1.0, "backward": 2.0}, Counts())
    with pytest.raises(ValueError, match=r"pace has no segment 'forwrd'; did you mean forward\?"):
        pacer.computed("forwrd")
    with pytest.raises(ValueError, match=r"the duration of a segment is a number of seconds ≥ 0, not nan"):
        pacer.computed(math.nan)
    with pytest.raises(ValueError, match=r"pace has no segment 'F'; emulate was given no durations"):
        Pacer({}, Counts()).computed("F")


def test_alarms_ring_in_the_order_of_their_times() -> None:
    import threading

    from autopar.runtime.wire.clock import now

    alarms, rung, done = Alarms(), list[str](), threading.Event()
    start = now()

    def last() -> None:
        rung.append("late")
        done.set()

    alarms.at(start + 0.03, last)
    alarms.at(start + 0.01, lambda: rung.append("soon"))
    alarms.at(start + 0.01, lambda: rung.append("soon, too"))
    assert done.wait(10)
    assert now() >= start + 0.03
    assert rung == ["soon", "soon, too", "late"]
