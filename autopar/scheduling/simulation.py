"""Simulate lines: compute the begin and the end of each op and message, for both ways of issuing.

``"enqueue"``, as on a GPU: the host runs ahead, and each stream runs its lines in the order of issue. A message begins
when its stream is free and its operands exist, wherever its start stands among computations. A wait blocks the
computations after it. ``"direct"``, as on a CPU: the host computes itself. A line is issued when all lines before it
have ended; a message begins then, or when its stream is free; a wait blocks the host.

The times of a line follow from those of the lines before it: one addition and a few comparisons a line. Where
communication slows computation down (``interference``), or streams share a link, the simulation goes from event to
event.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from autopar.errors import ScheduleError, shown
from autopar.scheduling.graph import Graph
from autopar.scheduling.interference import slowed
from autopar.scheduling.lines import COMPUTE, START, Draft, Line, Part
from autopar.scheduling.op import Op
from autopar.scheduling.verify import draft_of

Issue = Literal["enqueue", "direct"]
Startup = float | Mapping[str, float]  # θ: seconds, of all collectives or by name
ISSUES: tuple[Issue, ...] = get_args(Issue)


class Span(NamedTuple):
    """An op that computes, or a message: its parts, its stream, and its begin and end in seconds."""

    parts: tuple[Part, ...]
    stream: str
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The times of all ops and messages.

    Attributes:
        spans: ops and messages, in the order of issue.
        makespan: seconds from the begin of the first line to the end of the last.
        exposed: exposed communication: the seconds in which computation waits for it.
    """

    spans: tuple[Span, ...]
    makespan: float
    exposed: float


class Times(NamedTuple):
    """Begin and end of each op that computes and of each message, the makespan, and the exposed communication."""

    compute: list[tuple[float, float]]
    messages: list[tuple[float, float]]
    makespan: float
    exposed: float


def simulate(ops: Iterable[Op], lines: Iterable[Line], issue: Issue = "enqueue", *, startup: Startup = 0.0,
             interference: float = 0.0, start_seconds: float = 0.0) -> Simulation:  # fmt: skip
    """Simulate any sequence of lines, after it has been verified.

    Args:
        ops: what is scheduled.
        lines: the order, as ``Schedule.lines`` has it.
        issue: how lines are issued.
        startup: θ, the fixed seconds of each message, for all collectives or by name.
        interference: while a message is under way, an op takes (1 + interference) times as long.
        start_seconds: the seconds of the host for each start of a message, for ``"direct"``.

    Raises:
        ScheduleError: a line is missing, doubled or misplaced, or an option has a wrong value.
    """
    graph = Graph(ops, startup_of(startup), number("start_seconds", start_seconds))
    draft = draft_of(graph, lines)
    return spans_of(draft, times(draft, issue_of(issue), number("interference", interference)))


def issue_of(issue: object) -> Issue:
    """Return a way of issuing, or raise ``ScheduleError``."""
    if issue not in ISSUES:
        raise ScheduleError(f"issue={shown(issue)}; there are {', '.join(map(repr, ISSUES))}")
    return issue


def startup_of(startup: object) -> Startup:
    """Return start-up seconds, for all collectives or by name, each checked to be a number from 0."""
    if isinstance(startup, Mapping):
        return {name: number(f"startup[{name!r}]", value) for name, value in startup.items()}
    return number("startup", startup)


def number(name: str, value: object) -> float:
    """Return a number from 0, or raise with the name of the option."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={shown(value)} is no number")
    if not 0 <= value < float("inf"):
        raise ScheduleError(f"{name}={shown(value)}; give a finite number from 0")
    return float(value)


def times(draft: Draft, issue: Issue, interference: float = 0.0) -> Times:
    """Return the times of a draft that needs no check. Linear in the lines."""
    if interference or draft.graph.shares:
        return Times(*slowed(draft, issue == "direct", interference))
    graph, is_direct = draft.graph, issue == "direct"
    before, stream, seconds = graph.before, graph.stream, graph.seconds
    ended = [0.0] * len(graph)
    compute: list[tuple[float, float]] = [(0.0, 0.0)] * len(graph)
    messages: list[tuple[float, float]] = [(0.0, 0.0)] * len(draft.messages)
    free, exposed, now = [0.0] * len(graph.streams), 0.0, 0.0
    for kind, at in draft.lines:
        if kind == COMPUTE:
            begin, now = now, now + seconds[at]
            ended[at] = now
            compute[at] = begin, now
        elif kind == START:
            parts = draft.messages[at]
            own = stream[parts[0][0]]
            begin = free[own]
            if is_direct:
                now += graph.start_seconds
                begin = max(begin, now)
            for i, _, _ in parts:
                for j in before[i]:
                    if ended[j] > begin:
                        begin = ended[j]
            free[own] = end = begin + graph.message_seconds(parts)
            messages[at] = begin, end
            for i, _, _ in parts:
                if end > ended[i]:
                    ended[i] = end
        elif messages[at][1] > now:
            exposed += messages[at][1] - now
            now = messages[at][1]
    return Times(compute, messages, now, exposed)


def spans_of(draft: Draft, times: Times) -> Simulation:
    """Return the times with the names of ops."""
    graph, spans = draft.graph, []
    for line, (kind, at) in zip(draft.written(), draft.lines, strict=True):
        if kind == COMPUTE:
            spans.append(Span(line.parts, graph.streams[0], *times.compute[at]))
        elif kind == START:
            stream = graph.streams[graph.stream[draft.messages[at][0][0]]]
            spans.append(Span(line.parts, stream, *times.messages[at]))
    return Simulation(tuple(spans), times.makespan, times.exposed)
