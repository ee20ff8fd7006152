"""Show programs and reports in notebooks as HTML, and tables in the terminal where their name alone is typed."""

from __future__ import annotations

import html
import io
import re

from rich.console import Console
from rich.table import Column, Table

STYLE = "line-height:1.25;overflow-x:auto;white-space:pre;margin:0"
COLOURS = (  # part of a program's line → its colour; texts that are no programs have none of them
    (r"(?<=\s)# .*$", "#7a828e"),  # a comment
    (r"(?<=[\d)?])(?:/[A-Za-z_]\w*)+", "#2456a6;font-weight:600"),  # the axes that split a dim
    (r"(?<=\] )\+\S+", "#b35900;font-weight:600"),  # a partial sum
    (r"^(?:forward|backward|update|weight_gradients|finish):$", "#2f7d5b;font-weight:600"),  # a phase
)
PATTERN = re.compile("|".join(f"({pattern})" for pattern, _ in COLOURS), re.MULTILINE)


def as_html(text: str, *, program: bool = False) -> str:
    """Return a text as HTML with fixed widths; splits and partial sums of a ``program`` are coloured."""
    if not program:
        return f'<pre style="{STYLE}">{html.escape(text)}</pre>'
    parts, end = [], 0
    for match in PATTERN.finditer(text):
        colour = COLOURS[(match.lastindex or 1) - 1][1]
        parts += [
            html.escape(text[end : match.start()]),
            f'<span style="color:{colour}">{html.escape(match[0])}</span>',
        ]
        end = match.end()
    return f'<pre style="{STYLE}">{"".join(parts)}{html.escape(text[end:])}</pre>'


def printed(*tables: Table, width: int = 120) -> str:
    """Return tables as text, with ``width`` characters a line at most."""
    out = io.StringIO()
    console = Console(file=out, width=width)
    for table in tables:
        console.print(table)
    return out.getvalue()


def right(header: str) -> Column:
    """Return a column of numbers."""
    return Column(header, justify="right")


class InNotebook:
    """What notebooks show as its text."""

    def _repr_html_(self) -> str:
        return as_html(str(self))


class ProgramInNotebook(InNotebook):
    """A program in a notebook."""

    def _repr_html_(self) -> str:
        return as_html(str(self), program=True)


class TableReport(InNotebook):
    """A report that prints as a table also where its name alone is typed."""

    def __repr__(self) -> str:
        return str(self)
