"""Check a sequence of lines: each op once, all bytes once, starts after their operands, waits before readers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from autopar.errors import ScheduleError, class_of
from autopar.scheduling.graph import Graph, PartOf, near
from autopar.scheduling.lines import COMPUTE, KINDS, START, WAIT, Draft, Line


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
