"""Check that wrong ops, lines and options are refused, with the offender and the remedy."""

from __future__ import annotations

import re
from typing import Any

import pytest

from autopar.errors import ScheduleError
from autopar.scheduling import ByteScheduler, Line, Op, Part, schedule, simulate

OPS = [Op("loss", "compute", 1.0), Op("sum", "dp", 2.0, ("loss",), bytes=8), Op("update", "compute", 1.0, ("sum",))]


@pytest.mark.parametrize(
    ("ops", "text"),
    [
        ([Op("a", "compute", 1.0), Op("a", "dp", 1.0)], "two ops have the name 'a'"),
        ([Op("loss", "compute", 1.0, ("lost",))], "op 'loss' reads 'lost', which is no op; did you mean 'loss'"),
        ([Op("a", "dp", 1.0, ("b",)), Op("b", "dp", 1.0, ("a",))], "in a circle: a → b → a"),
    ],
)
def test_wrong_steps(ops: list[Op], text: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(text)):
        schedule(ops)


@pytest.mark.parametrize(
    ("kind", "text", "fields"),
    [
        (ScheduleError, "op 'a': seconds=-1.0; give a finite number from 0", {"seconds": -1.0}),
        (ScheduleError, "op 'a': seconds=nan", {"seconds": float("nan")}),
        (ScheduleError, "op 'a': bytes=-1", {"bytes": -1}),
        (TypeError, "op 'a': seconds='1' is no number", {"seconds": "1"}),
        (TypeError, "op 'a': bytes=1.5 is no int", {"bytes": 1.5}),
        (TypeError, "op 'a': after='loss' is no sequence of names", {"after": "loss"}),
        (TypeError, "op 'a': after=None is no sequence of names", {"after": None}),
        (TypeError, "the stream of an op is a word, not 3", {"stream": 3}),
        (TypeError, "op 'a': kind=[] cannot be hashed", {"kind": []}),
    ],
)
def test_wrong_ops(kind: type[Exception], text: str, fields: dict[str, Any]) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        Op(**{"name": "a", "stream": "dp", "seconds": 1.0} | fields)


@pytest.mark.parametrize(
    ("kind", "text", "options"),
    [
        (ScheduleError, "no policy 'longest-tale'; did you mean 'longest-tail'; there are", {"policy": "longest-tale"}),
        (TypeError, "a policy is a name, such as 'longest-tail', or ByteScheduler(…), not 3", {"policy": 3}),
        (ScheduleError, "issue='cpu'; there are 'enqueue', 'direct'", {"issue": "cpu"}),
        (ScheduleError, "startup=-1; give a finite number from 0", {"startup": -1}),
        (TypeError, "interference='much' is no number", {"interference": "much"}),
        (TypeError, "memory='1 GB' is no number", {"memory": "1 GB"}),
        (TypeError, "memory=1.5 is no whole number of bytes", {"memory": 1.5}),
        (ScheduleError, "'priorities' needs priorities={glob: int}", {"policy": "priorities"}),
        (ScheduleError, "'ddp' takes no priorities", {"policy": "ddp", "priorities": {"*": 1}}),
        (ScheduleError, "the priority 'los' matches no op; near it: loss", {"priorities": {"los": 1}}),
        (TypeError, "'loss': 'high' is no glob with an int", {"priorities": {"loss": "high"}}),
        (
            ScheduleError,
            "contradict each other on 'loss': 'l*' says 1, '*s' says 2",
            {"priorities": {"l*": 1, "*s": 2}},
        ),
        (
            ScheduleError,
            "'update' has 1 and goes before 'loss' with 2, which it depends on; give 'loss' at most 1",
            {"priorities": {"loss": 2, "update": 1}},
        ),
    ],
)
def test_wrong_options(kind: type[Exception], text: str, options: dict[str, Any]) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        schedule(OPS, **options)


def test_something_else_than_ops() -> None:
    with pytest.raises(TypeError, match=r"ops are Op\(name, stream, seconds, …\), not 'loss'"):
        schedule(["loss"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"ops are a sequence of Op\(name, stream, seconds, …\), not None"):
        schedule(None)  # type: ignore[arg-type]


def test_pieces_that_are_too_small() -> None:
    ops = [Op("loss", "compute", 1.0), Op("sum", "dp", 2.0, ("loss",), bytes=2_000_000)]
    text = "messages of 1 bytes are 2,000,000, the most of them for 'sum' with 2,000,000 bytes; at most 1,000,000 are"
    with pytest.raises(ScheduleError, match=text):
        schedule(ops, ByteScheduler(1, 1))


def test_the_memory_that_an_error_names_is_enough_and_nearly_the_least() -> None:
    ops = [Op(f"grad{i}", "compute", 1.0, (f"grad{i - 1}",) if i else (), memory=10) for i in range(4)]
    ops += [Op(f"sum{i}", "dp", 1.5, (f"grad{i}",), bytes=10, memory=10) for i in range(4)]
    ops += [Op(f"update{i}", "compute", 0.5, (f"sum{i}",)) for i in range(4)]
    with pytest.raises(ScheduleError, match="fits into 10 bytes; the smallest that was found needs 30 bytes: raise"):
        schedule(ops, memory=10)
    assert schedule(ops, memory=30).memory == 30


@pytest.mark.parametrize(
    ("text", "partition", "credit"),
    [("give at least 1 byte", 0, 1), ("credit=1 is less than partition=2, so that .* credit of at", 2, 1)],
)
def test_wrong_sizes(text: str, partition: int, credit: int) -> None:
    with pytest.raises(ScheduleError, match=text):
        ByteScheduler(partition, credit)


def line(text: str) -> Line:
    """``start sum:0:8``"""
    kind, *parts = text.split()
    split = [part.split(":") for part in parts]
    return Line(kind, tuple(Part(name, int(begin), int(end)) for name, begin, end in split))  # type: ignore[arg-type]


RIGHT = "compute loss:0:0, start sum:0:4, start sum:4:8, wait sum:0:4, wait sum:4:8, compute update:0:0"


def test_chunks_are_lines() -> None:
    lines = [line(text) for text in RIGHT.split(", ")]
    assert simulate(OPS, lines).makespan == 4
    assert simulate(OPS, lines, startup=1.0).makespan == 5


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("wait sum:4:8, ", "", "line 5, compute update: it reads 'sum', which is not waited for yet"),
        ("compute loss:0:0, ", "", "line 1, start sum: it reads 'loss', which is not computed yet"),
        ("start sum:4:8, ", "", "no message of these parts is under way"),
        (", compute update:0:0", "", "op 'update' is not computed"),
        ("compute update:0:0", "compute update:0:0, compute update:0:0", "it is computed twice"),
        ("start sum:4:8", "start sum:3:8", "3:8 of 'sum' is started twice"),
        ("start sum:4:8", "start sum:4:9", "'sum' has 8 bytes, and no range 4:9"),
        ("compute loss", "compute los", "'los' is no op; did you mean 'loss'"),
        ("compute loss", "start loss", "'loss' computes; it cannot be started"),
        ("start sum:0:4", "compute sum:0:4", "it is a collective on dp; start it, and wait for it"),
        (
            "start sum:4:8, wait sum:0:4, wait sum:4:8, compute update:0:0",
            "wait sum:0:4",
            "op 'sum' is not sent whole: 4 of 8 bytes",
        ),
        ("compute loss", "run loss", "there are no lines of kind 'run'"),
    ],
)
def test_wrong_lines(old: str, new: str, text: str) -> None:
    changed = RIGHT.replace(old, new)
    assert changed != RIGHT
    with pytest.raises(ScheduleError, match=re.escape(text)):
        simulate(OPS, [line(text) for text in changed.split(", ")])
