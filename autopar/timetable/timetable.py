"""Hold the timetable of a step or a call: for each rank its runs, in order. It prints, and parses back.

timetable of 3 micro-batches, 1 stage
ranks 0-3
  copy hands copies
  first 0 takes batches inputs copies hands copies counts sums empties inputs
  inner 1 takes inputs copies counts sums hands copies counts sums empties inputs
  last 2 takes inputs copies counts sums empties inputs copies counts
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autopar.errors import TextError
from autopar.ir.mesh import ranges_of
from autopar.notebook import InNotebook
from autopar.timetable.entry import Line, line_of, text_of
from autopar.timetable.verify import check


@dataclass(frozen=True)
class Position:
    """The ranks that run the same lines.

    Attributes:
        ranks: the ranks.
        stages: their stages of a pipeline; empty where there are none.
        lines: what they run, in order.
    """

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Timetable(InNotebook):
    """What each rank runs, in which order. Prints as text.

    Attributes:
        batches: the number of micro-batches; 0 for a call.
        positions: the ranks, by their position along the pipeline, with their lines.
        name: the name of the schedule of a pipeline.
    """

    batches: int
    positions: tuple[Position, ...]
    name: str = ""

    def of(self, rank: int) -> tuple[Line, ...]:
        """Return the lines of a rank. ``ValueError`` if it is not there."""
        for position in self.positions:
            if rank in position.ranks:
                return position.lines
        raise ValueError(f"the timetable has no rank {rank}; it is of {ranges_of(self.ranks)}")

    @property
    def ranks(self) -> list[int]:
        """All ranks."""
        return sorted(rank for position in self.positions for rank in position.ranks)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return max(1, sum(len(position.stages) for position in self.positions))

    def verify(self) -> None:
        """Check that each run takes what was handed on before; ``VerifyError`` quotes the line that does not."""
        for position in self.positions:
            check(position.lines, self.batches)

    def __str__(self) -> str:
        batches = f"{self.batches} micro-batch{'es' * (self.batches > 1)}" if self.batches else "a call"
        name = f", {self.name}" if self.name else ""
        head = f"timetable of {batches}, {self.stages} stage{'s' * (self.stages > 1)}{name}"
        texts = [head]
        for position in self.positions:
            stages = (
                f", stage{'s' * (len(position.stages) > 1)} {ranges_of(position.stages)}" if position.stages else ""
            )
            texts.append(f"ranks {ranges_of(position.ranks)}{stages}")
            texts += [f"  {text_of(line)}" for line in position.lines]
        return "\n".join(texts)

    @staticmethod
    def parse(text: str) -> Timetable:
        """Return the timetable that prints as ``text``; ``TextError`` names the line and what is wrong with it."""
        head, *lines = text.splitlines() or [""]
        found = _HEAD.fullmatch(head)
        if found is None:
            raise TextError(f"line 1: the header is 'timetable of 4 micro-batches, 1 stage'\n    {head}")
        batches, stages, name = found.groups()
        positions: list[tuple[tuple[int, ...], tuple[int, ...], list[Line]]] = []
        for number, line in enumerate(lines, 2):
            try:
                if line.startswith("  ") and positions:
                    positions[-1][2].append(line_of(line.strip()))
                else:
                    positions.append((*_ranks_and_stages(line), []))
            except TextError as error:
                raise TextError(f"line {number}: {error}\n    {line}") from None
        made = Timetable(int(batches or 0), tuple(Position(*row[:2], tuple(row[2])) for row in positions), name or "")
        if made.stages != int(stages):
            raise TextError(f"line 1: the timetable has {made.stages} stages\n    {head}")
        return made


_HEAD = re.compile(r"timetable of (?:a call|(\d+) micro-batch(?:es)?), (\d+) stages?(?:, (.+))?")
_RANKS = re.compile(r"ranks ([-\d :]+)(?:, stages? ([-\d :]+))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def _ranks_and_stages(line: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    found = _RANKS.fullmatch(line)
    if found is None:
        raise TextError("the ranks of a position are written as 'ranks 0-3' or 'ranks 0 1, stage 0', before its lines")
    return _numbers(found[1]), _numbers(found[2] or "")


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers that ``ranges_of`` writes as ``text``."""
    numbers: list[int] = []
    for word in text.split():
        found = _RANGE.fullmatch(word)
        if found is None:
            raise TextError(f"{word!r} is neither a rank nor ranks, as 0-3 or 1-9:2")
        first, last, step = found.groups()
        numbers += range(int(first), int(last or first) + 1, int(step or 1))
    return tuple(numbers)
