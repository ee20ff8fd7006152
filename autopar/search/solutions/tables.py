"""Print the answers of a solution: what each layout of a value costs, and in what two plans differ."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from autopar.notebook import TableReport, printed, right
from autopar.search.solutions.again import Alternative
from autopar.search.solutions.planned import Planned


@dataclass(frozen=True, repr=False)
class Explanation(TableReport):
    """What each layout of a value costs, the cheapest first. Prints as a table."""

    name: str
    alternatives: tuple[Alternative, ...]

    def __str__(self) -> str:
        table = Table(self.name, right("ms"), right("more"), "")
        best = self.alternatives[0].nanoseconds
        for row in self.alternatives:
            part = row.nanoseconds / best - 1
            more = "" if part <= 0 else "< +0.01%" if part < 5e-5 else f"+{part:.2%}"
            table.add_row(row.layout, f"{row.nanoseconds / 1e6:,.3f}", more, "the plan's" * row.chosen)
        return printed(table)


@dataclass(frozen=True, repr=False)
class Difference(TableReport):
    """The values of which two plans give other layouts. Prints as a table.

    Attributes:
        rows: the name of a value, its layouts in the first plan and in the second.
        nanoseconds, others: the prices of the two plans.
    """

    rows: tuple[tuple[str, str, str], ...]
    nanoseconds: int
    others: int

    def __str__(self) -> str:
        table = Table("value", "this plan", "the other")
        for row in self.rows:
            table.add_row(*row)
        more = f"{self.nanoseconds / 1e6:,.3f} ms, the other {self.others / 1e6:,.3f} ms\n"
        return (printed(table) if self.rows else "all layouts are the same\n") + more


def gives_text(planned: Planned | None) -> str:
    """Return the layouts that a plan gives to the results of a value, in one text."""
    return "" if planned is None else ", ".join(text or "–" for text in planned.gives)
