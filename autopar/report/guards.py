"""Report the guards of captures: what each asks of a call, how often it did not hold, and what was captured for it."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Column, Table

from autopar.notebook import printed

HEADERS = ("calls beyond it", "captures for them")


@dataclass(frozen=True)
class GuardRow:
    """One guard.

    Attributes:
        guard: the condition: ``s1 <= 512``, ``dim 1 of x is 8``; or the value that a forward read: ``beta is 0.5``.
        source: the user's line that needs it; "" where torch alone does.
        failed: how many new calls it did not hold for.
        recaptures: how many captures were made because of it.
    """

    guard: str
    source: str
    failed: int
    recaptures: int


class GuardReport(tuple[GuardRow, ...]):
    """All guards on sizes, and the guards on values that did not hold; prints as a table.

    Attributes:
        captures: how many captures there are.
        recaptures: how many of them were made because a guard did not hold.
        symbols: for each capture with symbols, what they are and for how many sizes it was used; and why others have
            none.
    """

    captures: int
    symbols: tuple[str, ...]

    @staticmethod
    def of(rows: list[GuardRow], captures: int, symbols: list[str]) -> GuardReport:
        report = GuardReport(rows)
        report.captures, report.symbols = captures, tuple(symbols)
        return report

    @property
    def recaptures(self) -> int:
        return sum(row.recaptures for row in self)

    def __str__(self) -> str:
        table = Table("guard", *(Column(header, justify="right") for header in HEADERS), "line")
        for row in self:
            table.add_row(row.guard, str(row.failed), str(row.recaptures), row.source or "–")
        counted = f"captures: {self.captures}, of which {self.recaptures} were made because a guard did not hold\n"
        return printed(table) + counted + "".join(f"{line}\n" for line in self.symbols)
