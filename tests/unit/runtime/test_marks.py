"""The clocks of recorded and of compared steps, with a stand-in for an accelerator, whose events pass later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autopar
from autopar import Mesh
from autopar.ir.hosts import Hosts
from autopar.pipeline import Task
from autopar.runtime.marks import EventMarks, HostMarks, marks_of, wait_begins, wait_ends
from autopar.runtime.measuring.peak import peak_bytes
from autopar.runtime.processes.agreement import UNKNOWN
from autopar.runtime.running.messages import RecordedMessages
from autopar.step.reports import recorded_steps
from autopar.step.reports.pace import RankClock


class Device(HostMarks):
    """An accelerator: its events have times when it has done the work before them.

    Attributes:
        made: how many events were made.
        settled: how often the host waited for it.
    """

    every = 3

    def __init__(self) -> None:
        self.made = self.settled = 0
        self._queue: list[Any] = []
        self._time = 100.0

    def mark(self) -> Any:
        self.made += 1
        event = SimpleNamespace(time=None)
        self._queue.append(event)
        return event

    def work(self, seconds: float) -> None:
        self._queue.append(seconds)

    def run(self) -> None:
        for one in self._queue:
            if isinstance(one, float):
                self._time += one
            else:
                one.time = self._time
        self._queue.clear()

    def settle(self) -> None:
        self.settled += 1
        self.run()

    def seconds(self, begin: Any, end: Any) -> float:
        return end.time - begin.time

    def have_passed(self, last: Any) -> bool:
        return last.time is not None


def test_each_device_has_its_marks() -> None:
    assert type(marks_of(torch.device("cpu"))) is type(marks_of(torch.device("meta"))) is HostMarks
    assert type(marks_of(torch.device("cuda", 1))) is EventMarks and EventMarks.every > HostMarks.every == 1


def test_a_recorded_step_waits_for_the_device_twice_and_others_never(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(recorded_steps, "marks_of", lambda of: device)
    mark = device.mark

    def later() -> Any:  # each line takes a second
        device.work(1.0)
        return mark()

    device.mark = later  # type: ignore[method-assign]

    class Net(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    parallel = autopar.parallelize(Net(4, 4), Mesh(dp=1), cache=False)
    step, x = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1)), torch.randn(2, 4)
    timeline = step.timeline(x)
    lines = [line for run in timeline.runs[0] for line in run.lines]
    assert len(lines) > 5 and device.settled == 2
    assert [line.begin for line in lines] == sorted(line.begin for line in lines) and lines[0].begin == 1.0
    assert all((line.end - line.begin) >= 1.0 for line in lines)
    made = device.made
    step(x)
    assert (device.made, device.settled) == (made, 2)


class Silent:
    """Messages that come after a second."""

    device = torch.device("cpu")

    def __init__(self, device: Device) -> None:
        self._device = device

    def start(self, messages: Any) -> None: ...

    def wait(self, task: object) -> Any:
        self._device.work(1.0)
        return {}
        yield

    def during(self, where: Any) -> Any:
        return nullcontext()


def finished(steps: Iterator[Any]) -> None:
    assert list(steps) == []


def test_a_pass_begins_when_it_has_what_it_waits_for() -> None:
    device = Device()
    slots: list[Any] = []
    messages = RecordedMessages(Silent(device), device.mark, slots)  # type: ignore[arg-type]
    receive = Task("FR", 0, 0)
    begin = device.mark()
    messages.start([SimpleNamespace(task=receive, words="receive", other=1)])  # type: ignore[list-item]
    with messages.during("outer"):  # type: ignore[arg-type]
        device.work(0.25)
        with messages.during("waits"):  # type: ignore[arg-type]
            finished(messages.wait(receive))
            device.work(4.0)
        with messages.during("does not"):  # type: ignore[arg-type]
            device.work(0.5)
    device.run()
    found = {slot.words: (device.seconds(begin, slot.begin), device.seconds(begin, slot.end)) for slot in slots}
    assert found == {
        "receive": (0.25, 1.25), "waits": (1.25, 5.25), "does not": (5.25, 5.75), "outer": (1.25, 5.75),
    }  # fmt: skip


def paces(marks: Device | HostMarks, passes: bool = True) -> list[Any]:
    """What a rank sends after each of ten steps, which wait for 2 seconds and compute for 5 and one more."""
    ranks: Any = SimpleNamespace(paces=None, pace=UNKNOWN)
    clock, sent = RankClock(ranks, Mesh(dp=2), Hosts(("a",), (0, 0)), marks), []
    for k in range(10):
        clock.begin()
        for seconds, waits in ((5.0, False), (2.0, True), (1.0, False)):
            begun = wait_begins() if waits else None
            if isinstance(marks, Device):
                marks.work(seconds)
            if waits:
                wait_ends(begun)
        if isinstance(marks, Device) and passes:
            marks.run()
        clock.end(is_first=k == 0)
        sent.append(ranks.pace)
    return sent


def test_a_rank_on_an_accelerator_measures_some_steps_without_waiting() -> None:
    device = Device()
    sent = paces(device)
    assert [pace != UNKNOWN for pace in sent] == [k in (3, 6, 9) for k in range(10)]
    assert {computed for computed, _ in sent if computed >= 0} == {6.0}
    assert (device.made, device.settled) == (4 * 3, 0)  # steps 1, 4, 7: begin, end, and those of the wait
    assert wait_begins() is None


def test_a_step_that_the_device_has_not_ended_says_nothing() -> None:
    assert set(paces(Device(), passes=False)) == {UNKNOWN}


def test_on_the_host_each_step_from_the_second_one_is_measured() -> None:
    assert [pace != UNKNOWN for pace in paces(HostMarks())] == [k > 0 for k in range(10)]


def test_memory_of_an_accelerator_is_that_of_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def noted(name: str, value: int = 0) -> Any:
        return lambda *args: calls.append(name) or value

    for name, value in (("reset_peak_memory_stats", 0), ("memory_allocated", 300), ("max_memory_allocated", 1000)):
        monkeypatch.setattr(torch.accelerator, name, noted(name, value))
    assert peak_bytes(noted("the call"), torch.device("cuda")) == 700
    assert calls == ["reset_peak_memory_stats", "memory_allocated", "the call", "max_memory_allocated"]
