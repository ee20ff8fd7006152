"""Report the passes: one row each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import SupportsIndex, overload

from rich.table import Column, Table

from autopar.errors import shown
from autopar.notebook import TableReport, printed

PRICE = "price"  # the report of what a searched plan costs, and how far it is from the best


@dataclass(frozen=True)
class PassReport:
    """The report of one pass.

    Attributes:
        name: the pass's name.
        ms: milliseconds it took, without verification.
        inserted, removed, commits: numbers of nodes and of commits.
        bytes: axis → bytes that the rank with the largest pieces receives in one step of the program that the pass
            returned.
        notes: the decisions made for the user, in sentences.
        unmatched: for capture, the names of presets that match nothing in the model.
    """

    name: str
    ms: float
    inserted: int = 0
    removed: int = 0
    commits: int = 0
    bytes: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()


class Reports(TableReport, tuple[PassReport, ...]):
    """The reports of all passes; prints as a table."""

    def __str__(self) -> str:
        table = Table("pass", *(_right(c) for c in ("ms", "inserted", "removed", "commits")), "bytes per axis")
        for row in self:
            moved = ", ".join(f"{axis} {count:,}" for axis, count in row.bytes.items()) or "–"
            table.add_row(row.name, f"{row.ms:.1f}", str(row.inserted), str(row.removed), str(row.commits), moved)
        return printed(table, width=100) + "".join(f"{row.name}: {note}\n" for row in self for note in row.notes)

    @overload
    def __getitem__(self, key: SupportsIndex | str) -> PassReport: ...

    @overload
    def __getitem__(self, key: slice) -> tuple[PassReport, ...]: ...

    def __getitem__(self, key: SupportsIndex | slice | str) -> PassReport | tuple[PassReport, ...]:
        """Return a row by its position or by the pass's name; ``KeyError`` if no such pass has run."""
        if isinstance(key, str):
            for row in self:
                if row.name == key:
                    return row
            raise KeyError(f"no pass {shown(key)} has run; there are: {', '.join(row.name for row in self)}")
        return super().__getitem__(key)


def _right(header: str) -> Column:
    return Column(header, justify="right")
