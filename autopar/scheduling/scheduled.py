"""Hold and print a schedule: its lines, their times, and how far it is from the bound."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cached_property

from rich.console import Console
from rich.table import Column, Table

from autopar.notebook import InNotebook
from autopar.scheduling.lines import Line, Part
from autopar.scheduling.simulation import Issue, Simulation, Span

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
        out = io.StringIO()
        Console(file=out, width=120).print(table)
        rest = f"and {len(rows) - SHOWN} more lines\n" if len(rows) > SHOWN else ""
        return (
            f"{self.policy}, {self.issue}: makespan {self.makespan:,.6g} s, bound {self.bound:,.6g} s, ratio "
            f"{self.ratio:.3f}, exposed communication {self.exposed:,.6g} s\n{out.getvalue()}{rest}"
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
