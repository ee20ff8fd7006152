"""The bar of a long operation: on a terminal alone, after a while, with the module's name, and gone afterwards."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import CaptureError, Mesh
from autopar.capture import capture
from autopar.report import progress
from autopar.report.progress import doing
from autopar.search.solver.solver import gap_text


class Clock:
    """Takes the place of timers, and runs them when a test says that their time has come."""

    def __init__(self) -> None:
        self.started: list[Clock.Timer] = []

    def __call__(self, seconds: float, function: Callable[[], None]) -> Any:
        assert seconds == 1
        self.started.append(Clock.Timer(function))
        return self.started[-1]

    def pass_(self) -> None:
        self.started[-1].function()

    class Timer:
        def __init__(self, function: Callable[[], None]) -> None:
            self.function, self.cancelled, self.daemon = function, False, False

        def start(self) -> None: ...

        def cancel(self) -> None:
            self.cancelled = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(progress, "Timer", clock := Clock())
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return clock


@pytest.fixture
def terminal(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Callable[[], str]]]:
    """Makes stderr a terminal, from within a test, and gives what is written to it."""
    with contextlib.ExitStack() as stack:

        def opened() -> Callable[[], str]:
            ours, theirs = pty.openpty()
            stack.callback(os.close, ours)
            os.set_blocking(ours, False)
            stream = stack.enter_context(os.fdopen(theirs, "w"))
            monkeypatch.setattr(sys, "stderr", stream)
            written = b""

            def read() -> str:
                nonlocal written
                stream.flush()
                with contextlib.suppress(BlockingIOError):
                    while True:
                        written += os.read(ours, 1 << 16)
                return written.decode()

            return read

        yield opened


class Slow(nn.Module):
    """Its second layer takes a second."""

    def __init__(self, clock: Clock, fails: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.clock, self.fails = [clock], fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x))
        if self.clock[0].started and progress._bar is not None and progress._bar._progress is None:
            self.clock[0].pass_()
        if self.fails:
            raise ValueError("the model's own")
        return y.sum()


def gone(text: str) -> bool:
    """The last that happened to the line: it was erased; and the cursor is back."""
    return text.rindex("\x1b[2K") > text.rindex("capture") and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_long_capture_says_where_it_is(clock: Clock, terminal: Any) -> None:
    read = terminal()
    autopar.parallelize(Slow(clock), Mesh(dp=2), "ddp", example=(torch.randn(2, 4),))
    assert "capture, forward: second" in read()
    assert gone(read())
    assert len(clock.started) == 1, "capture and all passes are one operation"
    assert clock.started[0].cancelled and clock.started[0].daemon


def test_a_training_step_has_one_too(clock: Clock, terminal: Any) -> None:
    read = terminal()
    parallel = autopar.parallelize(Slow(clock), Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1))
    step.capture(torch.randn(4, 4))
    assert "capture, forward: second" in read()
    assert gone(read())


def test_it_goes_before_an_error_is_shown(clock: Clock, terminal: Any) -> None:
    read = terminal()
    with pytest.raises(ValueError, match="the model's own"):
        capture(Slow(clock, fails=True), (torch.randn(2, 4),))
    assert gone(read())
    clock.pass_()  # a timer that was late
    assert gone(read())
    assert progress._bar is None


def test_a_short_one_writes_nothing(terminal: Any, clock: Clock) -> None:
    read = terminal()
    capture(nn.Linear(4, 4), (torch.randn(2, 4),))
    assert read() == ""
    assert clock.started[0].cancelled


def test_passes_say_their_names(clock: Clock, terminal: Any) -> None:
    """The innermost is shown, and afterwards the outer one again."""
    read = terminal()
    with doing("parallelize"):
        with doing(lambda: "reshard"):
            assert progress._bar is not None and progress._bar.text() == "reshard"
            clock.pass_()
        assert progress._bar.text() == "parallelize"
    assert "reshard" in read()


def recorded_texts(terminal: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets what the bar would show at the end of each block."""
    terminal()
    texts: list[str] = []
    shown = progress._Bar.doing

    @contextlib.contextmanager
    def recorded(bar: progress._Bar, what: Any) -> Iterator[None]:
        with shown(bar, what):
            yield
            texts.append(bar.text())

    monkeypatch.setattr(progress._Bar, "doing", recorded)
    return texts


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).sum()


def test_a_search_says_how_far_it_is(terminal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = recorded_texts(terminal, monkeypatch)
    autopar.parallelize(Pair(), Mesh(dp=2, tp=2), example=(torch.randn(512, 64),), machine="cpu")
    values = re.compile(r"search, (layouts|transfers) of \d+ of \d+ values(: (up|down))?")
    assert any(values.fullmatch(text) for text in said), said
    assert any(re.fullmatch(r"search, \d+ values(, gap [\d.]+% above [\d.]+ ms)?", text) for text in said), said
    assert {"reshard", "verify reshard", "schedule", "localize"} <= {*said}


def test_a_gap_is_shown_once_there_are_a_plan_and_a_bound() -> None:
    assert gap_text(7, 3e6, 2e6) == "search, 7 values, gap 50.00% above 2.000 ms"
    assert gap_text(7, 2e6, 2e6) == "search, 7 values, gap 0.00% above 2.000 ms"
    for cost, bound in ((float("inf"), 2e6), (3e6, float("-inf")), (3e6, 0.0)):
        assert gap_text(7, cost, bound) == "search, 7 values"


def test_compiling_says_the_module(terminal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = recorded_texts(terminal, monkeypatch)
    parallel = autopar.parallelize(Pair(), Mesh(dp=1), "ddp", example=(torch.randn(8, 64),))
    parallel(torch.randn(8, 64)).backward()
    assert "compile, forward of rank 0" in {text.partition(":")[0] for text in said}
    assert any(text.startswith("compile, backward of rank 0: ") for text in said), said


def test_a_proof_says_the_op(terminal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = recorded_texts(terminal, monkeypatch)

    @torch.library.custom_op("progress::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda context, gradient: gradient * 2)
    with_op = type("Twice", (Pair,), {"forward": lambda self, x: twice(self.up(x)).sum()})
    autopar.parallelize(with_op(), Mesh(dp=2), "ddp", example=(torch.randn(8, 64),))
    assert "proof of progress::twice" in said


def test_nobody_else_writes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stderr is no terminal there is not even a timer."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with doing("capture"):
        assert progress._bar is None
    monkeypatch.setattr(sys, "stderr", None)
    with doing("capture"):
        assert progress._bar is None
    assert not clock.started


def test_other_ranks_are_silent(clock: Clock, terminal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal()
    for rank, bars in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        with doing("capture"):
            pass
        assert len(clock.started) == bars
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    with doing("capture"):
        pass
    assert len(clock.started) == 1


def test_what_is_printed_meanwhile_stays(clock: Clock, terminal: Any) -> None:
    read = terminal()
    with doing("capture"):
        clock.pass_()
        print("a warning", file=sys.stderr)
    assert "a warning" in read() and gone(read())


def test_errors_of_the_capture_keep_their_class(clock: Clock, terminal: Any) -> None:
    read = terminal()

    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            clock.pass_()
            return x[: int(x.sum())]

    with pytest.raises(CaptureError):
        capture(Reads(), (torch.randn(2, 4),))
    assert gone(read())
