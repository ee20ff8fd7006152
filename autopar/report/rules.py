"""Print the table of all sharding rules, from the tables in ``autopar/rules``."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autopar import rules
from autopar.ir.ops.seeded_random import LIBRARY
from autopar.rules.by_schema import BY_SCHEMA
from autopar.rules.registry import RULES, Rule

COMMAND = "python -m autopar rules > autopar/rules/TABLE.md"
FOLDER = Path(rules.__file__).parent
HEAD = f"""# Table of sharding rules

How each op of ATen can be split over ranks. [README.md](README.md) explains the notation. This page is made from the tables beside it; renew it with

    {COMMAND}

**Factors** are the loops of an op, as in einsum: `m k, k n -> m n`. A factor `k!` stays whole, `(a b)` is a merged dim, `...` any leading dims,
which broadcast, `1` a dim of size one, `()` a tensor without dims. A result that is `own` is no data: each rank has its own, which is never moved, and
only the op's backward reads it. Where a result lacks a factor that is split, that result is a partial sum, or,
after `by`, another partial reduction. Where the factors depend on a call's arguments, words say how: `open` dims can be split, `whole` ones cannot,
`part` has another size, `kept` is removed or of size one, `gone` is removed.

**Sums** are the operands through which a partial sum may pass: alternatives, or several together (`0+1`). A `view` lets it pass at no cost.
Operands and arguments are counted from 0.

† The rule follows the op's schema. The kernel runs on accelerators only, and was not run on pieces. All other rules are proven by running them.
"""  # noqa: E501


def page() -> str:
    """Return the whole page."""
    tables = list(_families())
    count = sum(len(table) for _, table in tables)
    return "\n".join([HEAD, f"{count} overloads.", *(_family(title, table) for title, table in tables)]) + "\n"


@dataclass(frozen=True)
class RuleRow:
    """A rule as the table has it.

    Attributes:
        op: the printed name, ``add.Tensor``.
        factors, sums: as in the page.
        table: the name of the table that has it.
        proven: whether it was run on pieces.
    """

    op: str
    factors: str
    sums: str
    table: str
    proven: bool


def rows() -> list[RuleRow]:
    """Return all rules of the tables in ``autopar/rules``."""
    return [
        RuleRow(rule.op, _factors(rule).replace("`", ""), _sums(rule), title.partition("\n")[0], not _by_schema(rule))
        for title, table in _families()
        for rule in table
    ]


def _families() -> Iterator[tuple[str, list[Rule]]]:
    """Yield the rules of each file of tables, with the name and docstring of the file."""
    for path in sorted(FOLDER.glob("*.py")):
        saved = dict(RULES)
        if path.stem in ("__init__", "registry", "binding"):
            continue
        try:
            RULES.clear()
            runpy.run_path(str(path))
            table = list(RULES.values())
        finally:
            RULES.clear()
            RULES.update(saved)
        if table:
            yield f"{path.stem}\n\n{(ast.get_docstring(ast.parse(path.read_text())) or '').strip()}", table


def _family(title: str, table: list[Rule]) -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for rule in table:
        rows.setdefault((_factors(rule), _sums(rule)), []).append(f"`{rule.op}`" + "†" * _by_schema(rule))
    lines = [f"| {', '.join(ops)} | {factors} | {sums} |" for (factors, sums), ops in rows.items()]
    return "\n".join([f"\n## {title}\n", "| op | factors | sums |", "| --- | --- | --- |", *lines])


def _by_schema(rule: Rule) -> bool:
    return rule.op.removeprefix(f"{LIBRARY.ns}::") in BY_SCHEMA


def _factors(rule: Rule) -> str:
    if isinstance(rule.pattern, str):
        return f"`{rule.pattern}`"
    summary = (rule.pattern.__doc__ or "by its arguments").strip().splitlines()[0].rstrip(".:")
    return summary.replace("``", "`").replace("|", "\\|")


def _sums(rule: Rule) -> str:
    linear = "by its arguments" if callable(rule.linear) else rule.linear
    return ", ".join(part for part in (linear, "view" * rule.view) if part)
