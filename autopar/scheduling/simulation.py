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
from functools import cached_property
from typing import Literal, NamedTuple, NoReturn, get_args

from rich.table import Column, Table

from autopar.errors import ScheduleError, class_of, shown
from autopar.notebook import InNotebook, printed
from autopar.scheduling.graph import Graph, PartOf, near
from autopar.scheduling.interference import slowed
from autopar.scheduling.lines import COMPUTE, KINDS, START, WAIT, Draft, Line, Part
from autopar.scheduling.op import Op

# -- scheduled ---------------------------------------------------------------------------------------------------------
#
# Hold and print a schedule: its lines, their times, and how far it is from the bound.


SHOWN = 200  # lines that are printed


@dataclass(frozen=True)
class Schedule(InNotebook):
    """An order of issue, with its times and its bound.

    Attributes:
        policy: the name of the policy.
        issue: ``"enqueue"`` or ``"direct"``.
        lines: computations, starts and waits, in the order of issue.
        simulation: the begin and the end of each op and message.
        bound: seconds; no order takes less, whatever its chunks and buckets.
        memory: the most bytes of results that are alive in a line.
        late: the collectives that run on a second stream over the same ranks.
        start_seconds: the seconds of the host for each start.
    """

    policy: str
    issue: Issue
    lines: tuple[Line, ...]
    simulation: Simulation
    bound: float
    memory: int = 0
    late: frozenset[str] = frozenset()
    start_seconds: float = 0.0

    @property
    def makespan(self) -> float:
        """Seconds of the whole schedule."""
        return self.simulation.makespan

    @property
    def exposed(self) -> float:
        """Exposed communication: the seconds in which computation waits for it."""
        return self.simulation.exposed

    @property
    def spans(self) -> tuple[Span, ...]:
        """Each op and message with its begin and end."""
        return self.simulation.spans

    @property
    def ratio(self) -> float:
        """The makespan divided by the bound; 1 if both are 0."""
        return self.makespan / self.bound if self.bound else 1.0

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The names of the ops in the order of issue; a collective stands where its first part is started."""
        return tuple(dict.fromkeys(part.op for line in self.lines if line.kind != "wait" for part in line.parts))

    def __str__(self) -> str:
        right = (Column(name, justify="right") for name in ("begin", "end"))
        table = Table("line", "what", "stream", *right)
        spans = iter(self.spans)
        rows = [(line, next(spans) if line.kind != "wait" else None) for line in self.lines]
        whole = {part for line in self.lines for part in line.parts if _is_alone(part, self._parts)}
        for line, span in rows[:SHOWN]:
            what = " ".join(part.op if part in whole else f"{part.op}[{part.begin}:{part.end}]" for part in line.parts)
            table.add_row(line.kind, what, *(("", "", "") if span is None else
                                             (span.stream, f"{span.begin:,.6g}", f"{span.end:,.6g}")))  # fmt: skip
        rest = f"and {len(rows) - SHOWN} more lines\n" if len(rows) > SHOWN else ""
        return (
            f"{self.policy}, {self.issue}: makespan {self.makespan:,.6g} s, bound {self.bound:,.6g} s, ratio "
            f"{self.ratio:.3f}, exposed communication {self.exposed:,.6g} s\n{printed(table)}{rest}"
        )

    @cached_property
    def _parts(self) -> dict[str, int]:
        """Collective → the number of parts in which it is sent."""
        count: dict[str, int] = {}
        for line in self.lines:
            if line.kind == "start":
                for part in line.parts:
                    count[part.op] = count.get(part.op, 0) + 1
        return count


def _is_alone(part: Part, parts: dict[str, int]) -> bool:
    return parts.get(part.op, 1) == 1


# -- verify ------------------------------------------------------------------------------------------------------------
#
# Check a sequence of lines: each op once, all bytes once, starts after their operands, waits before readers.


def draft_of(graph: Graph, lines: Iterable[Line]) -> Draft:
    """Check lines, and return them by the numbers of ops.

    Raises:
        ScheduleError: a line is missing, doubled, misplaced or of an unknown op; the error names the op and the line.
        TypeError: an item of ``lines`` is no ``Line``.
    """
    check = _Check(graph)
    for number, line in enumerate(lines, 1):
        if not isinstance(line, Line):
            raise TypeError(f"line {number} is {class_of(line)}; lines are Line(kind, parts)")
        check.line(line, number)
    return check.finished()


class _Check:
    """Follows the lines, and records which ops have been computed, started and waited for."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.draft = graph, Draft(graph)
        self.done: set[int] = set()  # computed, or all bytes waited for
        self.sent: dict[int, list[tuple[int, int]]] = {}  # collective → ranges that are started
        self.waited: dict[int, int] = {}  # collective → bytes that are waited for
        self.under_way: dict[tuple[PartOf, ...], int] = {}
        self.at = ""

    def refuse(self, text: str) -> NoReturn:
        raise ScheduleError(f"{self.at}: {text}")

    def line(self, line: Line, number: int) -> None:
        self.at = f"line {number}, {line}"
        if line.kind not in KINDS:
            self.refuse(f"there are no lines of kind {line.kind!r}; there are {', '.join(KINDS)}")
        if not line.parts:
            self.refuse("it has no op")
        for part in line.parts:
            if part.op not in self.graph.number:
                self.refuse(f"{part.op!r} is no op{near(part.op, self.graph.number)}")
        parts = [(self.graph.number[part.op], part.begin, part.end) for part in line.parts]
        kind = KINDS.index(line.kind)
        (self.compute, self.start, self.wait)[kind](parts)

    def compute(self, parts: list[PartOf]) -> None:
        (i, _, _), *more = parts
        if more:
            self.refuse("a line computes one op")
        if self.graph.stream[i]:
            self.refuse(f"it is a collective on {self.graph.ops[i].stream}; start it, and wait for it")
        if i in self.done:
            self.refuse("it is computed twice")
        self.check_reads(i)
        self.done.add(i)
        self.draft.lines.append((COMPUTE, i))

    def start(self, parts: list[PartOf]) -> None:
        first = parts[0][0]
        for i, begin, end in parts:
            op = self.graph.ops[i]
            if not self.graph.stream[i]:
                self.refuse(f"{op.name!r} computes; it cannot be started")
            if self.graph.kind[i] != self.graph.kind[first]:
                self.refuse(f"{op.name!r} is of another stream or kind than {self.graph.ops[first].name!r}")
            if len(parts) > 1 and not op.bytes:
                self.refuse(f"{op.name!r} has 0 bytes, and shares no message")
            if not (0 <= begin < end <= op.bytes or (not op.bytes and begin == end == 0)):
                self.refuse(f"{op.name!r} has {op.bytes} bytes, and no range {begin}:{end}")
            if any((begin < b and a < end) or not op.bytes for a, b in self.sent.get(i, ())):
                self.refuse(f"{begin}:{end} of {op.name!r} is started twice")
            self.check_reads(i)
            self.sent.setdefault(i, []).append((begin, end))
        self.under_way[tuple(parts)] = len(self.draft.messages)
        self.draft.lines.append((START, len(self.draft.messages)))
        self.draft.messages.append(parts)

    def wait(self, parts: list[PartOf]) -> None:
        message = self.under_way.pop(tuple(parts), None)
        if message is None:
            self.refuse("no message of these parts is under way")
        self.draft.lines.append((WAIT, message))
        for i, begin, end in parts:
            self.waited[i] = self.waited.get(i, 0) + end - begin
            if self.waited[i] == self.graph.bytes[i]:
                self.done.add(i)

    def check_reads(self, i: int) -> None:
        for j in self.graph.before[i]:
            if j not in self.done:
                op = self.graph.ops[j]
                missing = "waited for" if self.graph.stream[j] else "computed"
                self.refuse(f"it reads {op.name!r}, which is not {missing} yet")

    def finished(self) -> Draft:
        for i, op in enumerate(self.graph.ops):
            if i not in self.done:
                total = sum(end - begin for begin, end in self.sent.get(i, ()))
                what = (
                    "is not computed" if op.computes
                    else "is not started" if i not in self.sent
                    else f"is not sent whole: {total} of {op.bytes} bytes" if total < op.bytes
                    else "is not waited for"
                )  # fmt: skip
                raise ScheduleError(f"op {op.name!r} {what}")
        return self.draft


# -- simulation --------------------------------------------------------------------------------------------------------


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
