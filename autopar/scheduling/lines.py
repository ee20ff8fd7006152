"""Define the lines of a schedule: computations, starts and waits, in the order of issue.

    start w3 on dp
    compute backward2
    wait w3 on dp

A message is sent by one start: a whole collective, a chunk of one, or a bucket of several. A ``Draft`` is a schedule
under construction, by the numbers of ops. It puts each wait before the first reader of its message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from autopar.scheduling.graph import Graph, PartOf

LineKind = Literal["compute", "start", "wait"]


class Part(NamedTuple):
    """A range of the bytes of an op: all of them, or a chunk."""

    op: str
    begin: int
    end: int


@dataclass(frozen=True)
class Line:
    """One line. ``parts``: the op that computes, or the parts of the message that is started or waited for."""

    kind: LineKind
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return f"{self.kind} {' '.join(part.op for part in self.parts)}"


COMPUTE, START, WAIT = 0, 1, 2
KINDS: tuple[LineKind, ...] = ("compute", "start", "wait")


class Draft:
    """A schedule by numbers.

    Attributes:
        graph: what is scheduled.
        messages: the parts of each message, in the order in which they are started.
        lines: the kind of each line (``COMPUTE``, ``START``, ``WAIT``), and the number of its op or message.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.messages: list[list[PartOf]] = []
        self.lines: list[tuple[int, int]] = []
        self._open: dict[int, list[int]] = {}  # collective → its messages that nothing has waited for
        self._waited: set[int] = set()

    def compute(self, i: int) -> None:
        """Append a computation, and before it the waits for the collectives that it reads."""
        self.read(i)
        self.lines.append((COMPUTE, i))

    def start(self, parts: Sequence[PartOf]) -> int:
        """Append the start of a message, and before it the waits for the collectives that its parts read. Return the
        number of the message."""
        message = len(self.messages)
        for i, _, _ in parts:
            self.read(i)
        for i, _, _ in parts:
            self._open.setdefault(i, []).append(message)
        self.messages.append(list(parts))
        self.lines.append((START, message))
        return message

    def issue(self, i: int) -> None:
        """Append an op: its computation, or the start of the whole collective."""
        if self.graph.stream[i]:
            self.start([self.graph.whole(i)])
        else:
            self.compute(i)

    def read(self, i: int) -> None:
        """Append the waits for the collectives that an op reads."""
        for j in self.graph.before[i]:
            for message in self._open.pop(j, ()):
                self.wait(message)

    def wait(self, message: int) -> None:
        """Append the wait for a message, once."""
        if message not in self._waited:
            self._waited.add(message)
            self.lines.append((WAIT, message))

    def finished(self) -> Draft:
        """Append the waits for the messages that no op reads, and return the draft."""
        for message in range(len(self.messages)):
            self.wait(message)
        self._open.clear()
        return self

    def of_stream(self) -> list[list[int]]:
        """Return the messages of each stream in the order of their starts; that of ``"compute"`` has none."""
        order: list[list[int]] = [[] for _ in self.graph.streams]
        for kind, message in self.lines:
            if kind == START:
                order[self.graph.stream[self.messages[message][0][0]]].append(message)
        return order

    def written(self) -> tuple[Line, ...]:
        """Return the lines with the names of ops."""
        ops = self.graph.ops
        parts = [tuple(Part(ops[i].name, begin, end) for i, begin, end in message) for message in self.messages]
        return tuple(
            Line(KINDS[kind], (Part(ops[at].name, 0, ops[at].bytes),) if kind == COMPUTE else parts[at])
            for kind, at in self.lines
        )
