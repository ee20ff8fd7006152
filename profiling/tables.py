"""Print the tables of benchmarks."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

Row = Sequence[str]


def printed(title: str, columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Return rows as a table with a title."""
    table = Table(title=title, title_justify="left")
    for k, column in enumerate(columns):
        table.add_column(column, justify="right" if k else "left")
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=150).print(table)
    return out.getvalue()
