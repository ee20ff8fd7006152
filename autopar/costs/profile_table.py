"""Print a profile as a table: the calls that take most of a step, beside their prices, and the sums by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Column, Table
from rich.text import Text

from autopar.costs.profile_row import ProfileRow
from autopar.notebook import printed

DEAREST = 24  # rows of the table; the others are one row
WIDTH = 160


def table_of(rows: Sequence[ProfileRow], by_phase: Mapping[str, float], machine: str) -> str:
    """Return the calls that take most of a step, the sum of the others, and the sums by phase, as text.

    Args:
        rows: all calls.
        by_phase: phase → seconds of a step.
        machine: the name of the machine whose prices stand beside the times.
    """
    right = [Column(name, justify="right", no_wrap=True) for name in ("times", "µs each", "priced", "ratio", "of all")]
    table = Table("phase", Column("call", overflow="fold"), *right, box=box.SIMPLE_HEAD, pad_edge=False)
    total = sum(by_phase.values())
    dearest = sorted((row for row in rows if row.times), key=lambda row: -row.total)
    for row in dearest[:DEAREST]:
        table.add_row(*_figures(row, total))
    if others := dearest[DEAREST:]:
        times, seconds = sum(sum(row.times.values()) for row in others), sum(row.total for row in others)
        what = f"{len(others)} other distinct calls"
        table.add_row("", what, f"{times:,}", "", "", "", f"{seconds / total:.1%}" if total else "")
    lines = [line.rstrip() for line in printed(table, width=WIDTH).splitlines() if line.strip()]
    phases = ", ".join(f"{phase} {seconds * 1e3:,.3f} ms" for phase, seconds in by_phase.items())
    return "\n".join([*lines, f"one after the other: {total * 1e3:,.3f} ms a step ({phases}); priced on {machine}", ""])


def _figures(row: ProfileRow, total: float) -> list[str | Text]:
    ratio = f"{row.seconds / row.price:,.2f}" if row.price and not row.why else "–"
    each = f"{row.seconds * 1e6:,.1f}" if not row.why else "–"
    share = f"{row.total / total:.1%}" if total else ""
    times = f"{sum(row.times.values()):,}"
    return [" ".join(row.times), Text(row.call), times, each, f"{row.price * 1e6:,.1f}", ratio, share]
