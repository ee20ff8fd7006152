"""Define the lines of a schedule: what computes, starts and is waited for, in the order in which it is issued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

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
