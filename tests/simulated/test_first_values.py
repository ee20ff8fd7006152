"""What a captured step does not repeat is refused, or its first value is kept: draws, iterators, clocks, counters."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import itertools
import logging
import os
import random
import secrets
import time
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from time import localtime, strftime
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar import CaptureError, Mesh
from autopar.capture import capture
from autopar.capture.guards.unrepeated import CLOCKS

GENERATOR, ITERATOR, SEEN, COUNT = np.random.default_rng(1), iter(range(1, 1000)), [], 0
SEEDED = random.Random(0)


@dataclasses.dataclass
class Stamped:
    at: float = dataclasses.field(default_factory=time.time)


class Timed:
    calls = 0


class Beside(nn.Module):
    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.a, self.read = nn.Linear(4, 4), read
        self.rng, self.old, self.python = np.random.default_rng(0), np.random.RandomState(0), random.Random(0)
        self.bits = np.random.PCG64(0)
        self.draw, self.in_a_dict = np.random.default_rng(0).uniform, {"rng": [np.random.default_rng(0)]}
        self.it, self.cycle, self.count = iter([0.5, 0.25, 2.0] * 9), itertools.cycle([1.0, 2.0]), itertools.count(1)
        self.made, self.zipped = (float(k) for k in range(1, 99)), zip([1.0] * 9, iter([2.0] * 9), strict=True)
        self.clock, self.later, self.of_system = time.monotonic, functools.partial(time.time), random.SystemRandom()
        self.calls = iter(time.perf_counter, None)
        self.n, self.seen, self.hits, self.height, self.steps = 0, [], [0, 0], 0, 1.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * self.read(self)


def counted(self: Any) -> float:
    self.n += 1
    return min(self.n / 10, 1.0)


def noted(self: Any) -> float:
    self.seen.append(2.0)
    return sum(self.seen)


def hit(self: Any) -> float:
    self.hits[0] += 1
    return self.hits[0] + self.hits[1]


def global_count(self: Any) -> float:
    global COUNT
    COUNT += 1
    return COUNT / 10


REFUSED: dict[str, tuple[Callable[[Any], float], str]] = {
    "a generator of NumPy's": (lambda m: m.rng.uniform(), "draws numbers from rng, a Generator"),
    "an old generator of NumPy's": (lambda m: m.old.rand(), "draws numbers from old, a RandomState"),
    "bits of NumPy's": (lambda m: m.bits.random_raw() % 7, "draws numbers from bits, a PCG64"),
    "a generator of Python's": (lambda m: m.python.random(), "draws numbers from python, a Random"),
    "its method": (lambda m: m.draw(), "draws numbers from draw, a Generator"),
    "one in a container": (lambda m: m.in_a_dict["rng"][0].normal(), "draws numbers from in_a_dict"),
    "a global one": (lambda m: GENERATOR.uniform(), "draws numbers from the global GENERATOR of test_first_values"),
    "Python's own": (lambda m: random.random(), "draws numbers from random"),
    "NumPy's own": (lambda m: np.random.rand(), "draws numbers from numpy.random"),
    "one without a seed": (lambda m: np.random.default_rng().uniform(), "reads os.urandom()"),
    "an iterator": (lambda m: next(m.it), "advances it, a list_iterator"),
    "a loop over it": (lambda m: [value for value, _ in zip(m.it, range(2))][1], "advances it, a list_iterator"),  # noqa: B905
    "a cycle": (lambda m: next(m.cycle), "advances cycle, a cycle"),
    "a count": (lambda m: next(m.count), "advances count, a count"),
    "a function that yields": (lambda m: next(m.made), "advances made, a generator"),
    "two iterators": (lambda m: next(m.zipped)[1], "advances zipped, a zip"),
    "a global iterator": (lambda m: next(ITERATOR), "advances the global ITERATOR of test_first_values"),
    "a clock": (lambda m: time.time(), "reads time.time()"),
    "a clock by another name": (lambda m: m.clock(), "reads time.monotonic()"),
    "a partial clock": (lambda m: m.later(), "reads time.time()"),
    "a date": (lambda m: datetime.datetime.now().second + 1, "reads datetime.now()"),
    "a clock that a partial calls": (lambda m: functools.partial(time.time)(), "reads time.time()"),
    "a clock that iter calls": (lambda m: next(iter(time.monotonic, None)), "reads time.monotonic()"),
    "a clock that a dict calls": (lambda m: collections.defaultdict(time.time_ns)[0] % 7 + 1, "reads time.time_ns()"),
    "a clock that a dataclass calls": (lambda m: Stamped().at, "reads time.time()"),
    "an iterator that calls": (lambda m: next(m.calls), "advances calls, a callable_iterator"),
    "the time of now": (lambda m: localtime().tm_sec + 1, "reads time.localtime()"),
    "the time of None": (lambda m: time.gmtime(None).tm_sec + 1, "reads time.gmtime()"),
    "now in words": (lambda m: float(strftime("%Y")), "reads time.strftime()"),
    "now by another function": (lambda m: len(time.ctime()), "reads time.ctime()"),
    "a generator that shuffles": (
        lambda m: SEEDED.shuffle([1, 2, 3]) or 1.0,
        "draws numbers from the global SEEDED of",
    ),
    "Python's without a seed": (lambda m: random.Random().random(), "reads os.urandom()"),
    "randomness of the system": (lambda m: os.urandom(1)[0] + 1, "reads os.urandom()"),
    "a name that is unique": (lambda m: uuid.uuid4().int % 7, "reads "),
    "a secret": (lambda m: secrets.randbelow(5) + 1, "reads "),
    "a generator of the system": (lambda m: m.of_system.random(), "reads "),
    "a counter": (counted, "reads and changes n"),
    "a list": (noted, "reads and changes seen"),
    "an entry": (hit, "reads and changes hits"),
    "a global counter": (global_count, "reads and changes the global COUNT"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_repeated_is_refused_or_its_first_value_is_kept(case: str) -> None:
    read, problem = REFUSED[case]
    model, x = Beside(read), torch.randn(4, 4)
    with pytest.raises(CaptureError) as caught:
        autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x,), cache=False)
    assert isinstance(time.time, types.BuiltinFunctionType)  # it is put back
    first, line, remedy = str(caught.value).splitlines()
    assert first.startswith(f"forward {problem}"), first
    assert first.endswith(", and a captured step keeps the value of the first call")
    assert line.startswith("    test_first_values.py:")
    assert remedy.endswith('; parallelize(…, first_values="keep") keeps the first one, which all ranks must have alike')
    parallel = autopar.parallelize(
        Beside(read), Mesh(dp=2), "ddp", example=(x,), cache=False, first_values="keep", recapture=False
    )
    torch.testing.assert_close(parallel.simulate(x), parallel.simulate(x))
    (note,) = [note for note in parallel.reports["capture"].notes if "the captured step keeps the value of" in note]
    assert note.startswith(f"forward {problem}")


@pytest.mark.parametrize("read", [lambda m: m.rng.uniform(), lambda m: random.random(), lambda m: np.random.rand()])
def test_the_value_that_is_kept_is_the_first(read: Callable[[Any], float]) -> None:
    random.seed(3), np.random.seed(3)
    model, x = Beside(read), torch.randn(4, 4)
    expected = model(x)
    random.seed(3), np.random.seed(3)
    model.rng = np.random.default_rng(0)
    torch.testing.assert_close(
        autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x,), first_values="keep").simulate(x), expected
    )


def only_counts(self: Any) -> float:
    self.n += 1
    self.seen.append(self.steps)
    self.hits[1] += 1
    Timed.calls += 1
    SEEN.append(1)
    return 2.0


def written_first(self: Any) -> float:
    self.height = 640.5
    return self.height


def given_again(self: Any) -> float:
    before, self.steps = self.steps, 3.0 / 2.0
    return before


HARMLESS: dict[str, Callable[[Any], float]] = {
    "what only counts": only_counts,
    "what is written before it is read": written_first,
    "what gets an equal value": given_again,
    "an iterator that stays": lambda m: 1.0 if m.it is not None and m.count is not None else 2.0,
    "a generator that stays": lambda m: 1.0 if m.rng is not None and GENERATOR is not None else 2.0,
    "a generator of its own with a seed": lambda m: (
        np.random.default_rng(0).uniform() + random.Random(0).random() + random.Random(0).choice([1, 2, 3])
    ),
    "a time that is given": lambda m: float(strftime("%Y", localtime(m.steps))) + time.gmtime(*(m.steps,)).tm_sec,
    "a message to a log": lambda m: logging.getLogger("autopar of tests").info("x") or 1.0,
    "a clock that no call reads": lambda m: time.time() if m.n else 3.0,
}


@pytest.mark.parametrize("case", HARMLESS)
def test_what_is_harmless_is_captured_without_a_word(case: str) -> None:
    model, x = Beside(HARMLESS[case]), torch.randn(4, 4)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp")
    for _ in range(2):
        torch.testing.assert_close(parallel.simulate(x), model(x))
    assert parallel.captures == 1


def test_every_function_of_time_is_a_clock_or_none() -> None:
    functions = {name for name, value in vars(time).items() if isinstance(value, types.BuiltinFunctionType)}
    others = {"sleep", "mktime", "strptime", "tzset", "get_clock_info", "clock_getres", "clock_settime",
              "clock_settime_ns", "pthread_getcpuclockid"}  # fmt: skip
    assert functions - others == functions & CLOCKS.keys()


def test_a_clock_of_code_without_a_file() -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("import time\ndef read(m): return time.time()", space)  # as of ``python -c``
    with pytest.raises(CaptureError, match=r"forward reads time\.time\(\), .*\n    test_first_values\.py:.*read"):
        capture(Beside(space["read"]), (torch.randn(4, 4),))


def test_lines_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "numbers").write_text("0.5\n0.25\n")
    with (tmp_path / "numbers").open() as numbers:
        model = Beside(lambda m: float(m.file.readline()))
        model.file = numbers  # type: ignore[assignment]
        with pytest.raises(CaptureError, match="forward advances file, a TextIOWrapper"):
            capture(model, (torch.randn(4, 4),))


class Total(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


def test_steps_pipelines_and_local_rows_refuse_it_too() -> None:
    x, staged = torch.randn(4, 4), {"schedule": "1f1b", "microbatches": 2}
    local: dict[str, Any] = {"inputs": "local"}
    for mesh, options, of_step in ((Mesh(dp=2), local, {}), (Mesh(pp=2), {}, staged)):
        model = nn.Sequential(Beside(lambda m: m.rng.uniform()), Beside(lambda m: 1.0), Total())
        parallel = autopar.parallelize(model, mesh, "ddp", **options)
        step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), **of_step)
        with pytest.raises(CaptureError, match=r"draws numbers from .*rng, a Generator"):
            step.capture(x)


def test_the_option_is_checked() -> None:
    with pytest.raises(ValueError, match="first_values='first' is none of 'refuse', 'keep'"):
        autopar.parallelize(nn.Linear(2, 2), Mesh(dp=2), first_values="first")  # type: ignore[arg-type]
