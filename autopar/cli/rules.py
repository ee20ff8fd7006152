"""Run ``autopar rules``: print the table of sharding rules, or the rules of the ops that match a pattern."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from rich.table import Column
from rich.text import Text

from autopar.cli.output import OutputOptions, output_of
from autopar.cli.plan.show import table_of
from autopar.cli.status import DONE, status_of
from autopar.cli.train.refused import Refused
from autopar.report.progress import doing
from autopar.report.rules import RuleRow, page, rows

NEAR = 5  # names that an error lists
ALIKE = 0.62  # how like names are that it lists: 1 is the same name


def run(pattern: str | None, options: OutputOptions) -> int:
    """Print the rules whose ops match a glob, or the whole page; return the exit status."""
    return status_of(partial(_follow, pattern, options))


def _follow(pattern: str | None, options: OutputOptions) -> int:
    output = output_of(options)
    if pattern is None and not options.json:
        output.text.print(page(), end="", soft_wrap=True)
        return DONE
    with doing("read the rules"):
        found = rows()
    if pattern is not None:
        found = _matching(pattern, found)
        table = table_of("op", "factors", Column("sums"), "table")
        for row in found:
            table.add_row(*(Text(text) for text in (row.op + "†" * (not row.proven), row.factors, row.sums, row.table)))
        output.text.print(table)
    output.give({"rules": [asdict(row) for row in found]})
    return DONE


def _matching(pattern: str, found: Sequence[RuleRow]) -> list[RuleRow]:
    """Return the rules whose op, with its overload or without, matches a glob; ``Refused`` if there is none."""
    glob = pattern.removeprefix("aten::").removeprefix("aten.")
    matching = [row for row in found if any(fnmatch.fnmatchcase(name, glob) for name in (row.op, _packet(row.op)))]
    if matching:
        return matching
    names = list(dict.fromkeys(_packet(row.op) for row in found))
    inner = glob.strip("*?")
    near = [name for name in names if inner and inner in name] or difflib.get_close_matches(inner, names, NEAR, ALIKE)
    hint = f"near it: {', '.join(near[:NEAR])}" if near else "autopar rules prints all"
    raise Refused(f"no op with a rule matches {pattern}; {hint}")


def _packet(op: str) -> str:
    """``add.Tensor`` → ``add``"""
    return op.partition(".")[0]
