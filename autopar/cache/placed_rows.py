"""Write explicit programs with their orders, from which each rank's program is made, and what passes reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from autopar.cache.order_rows import order_of, order_to_json
from autopar.cache.program_rows import Types, program_of, rows_of
from autopar.cache.refused import NotCached
from autopar.ir.program import Program
from autopar.report.passes import PassReport
from autopar.runtime.localize import LocalPrograms
from autopar.verify.levels import verify

Placed = tuple[Program, LocalPrograms]


def placed_to_json(placed: Placed | None, types: Types) -> Any:
    """Return an explicit program and its order as JSON. ``NotCached`` if a part of it has no form."""
    if placed is None:
        return None
    program, local = placed
    if local.order is None:
        raise NotCached("the program has no order")
    if any(str(node.target) == "autopar.assumed.default" for node in program.nodes):
        raise NotCached("the program is for the values that the inputs had")
    return {"program": rows_of(program, types), "order": order_to_json(local.order)}


def placed_of(content: Any, types: Types, fixed: str) -> Placed | None:
    """Return the program, and the programs of the ranks, which are made once somebody asks for one.

    Args:
        fixed: why the program takes no edits.
    """
    if content is None:
        return None
    program = program_of(content["program"], types)
    program.fixed = fixed
    return program, LocalPrograms(program, lambda local: verify(local, "schedule"), order_of(content["order"]))


def reports_to_json(reports: Sequence[PassReport]) -> list[Any]:
    return [asdict(report) for report in reports]


def reports_of(content: Sequence[Mapping[str, Any]]) -> tuple[PassReport, ...]:
    rows = ({**row, "notes": tuple(row["notes"]), "unmatched": tuple(row["unmatched"])} for row in content)
    return tuple(PassReport(**row) for row in rows)
