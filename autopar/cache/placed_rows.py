"""Write and read explicit programs, their orders, and the reports of their passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from autopar.cache.order_rows import order_of, order_to_json
from autopar.cache.program_rows import Types, program_of, rows_of
from autopar.cache.refused import NotCached
from autopar.gc_pause import gc_paused
from autopar.ir.program import Program
from autopar.report.passes import PassReport
from autopar.runtime.localize import LocalPrograms
from autopar.scheduling.programs.order import Order
from autopar.verify.levels import verify

Placed = tuple[Program, LocalPrograms]
MOST_CLASSES = 4  # of ranks; the programs of more are made again from the explicit one


def placed_to_json(placed: Placed | None, types: Types) -> Any:
    """Return an explicit program and its order as JSON. ``NotCached`` if a part of it has no form."""
    if placed is None:
        return None
    program, local = placed
    if local.order is None:
        raise NotCached("the program has no order")
    if any(str(node.target) == "autopar.assumed.default" for node in program.nodes):
        raise NotCached("the program is for the values that the inputs had")
    made = local.every_class
    return {
        "program": rows_of(program, types),
        "order": order_to_json(local.order),
        "classes": local.ranks_of_classes,
        "local": [rows_of(each, types) for each in made] if len(made) <= MOST_CLASSES else None,
    }


def placed_of(content: Any, types: Types, fixed: str) -> Placed | None:
    """Return the program, and the programs of the ranks, which are made once somebody asks for one.

    Args:
        fixed: why the program takes no edits.
    """
    if content is None:
        return None
    program = program_of(content["program"], types)
    program.fixed = fixed
    return program, KeptLocalPrograms(program, order_of(content["order"]), content, types)


class KeptLocalPrograms(LocalPrograms):
    """The local programs of an explicit program, which another process has made and verified."""

    def __init__(self, program: Program, order: Order, content: Mapping[str, Any], types: Types) -> None:
        classes = [list(map(int, ranks)) for ranks in content["classes"]]
        super().__init__(program, lambda local: verify(local, "schedule"), order, classes)
        self._content, self._types = content["local"], types

    def _make(self) -> None:
        rows, self._content = self._content, None
        try:
            with gc_paused():
                self._made = {k: program_of(row, self._types) for k, row in enumerate(rows)}
        except Exception:  # whatever reading malformed rows raises; the explicit program has all that is needed
            super()._make()


def reports_to_json(reports: Sequence[PassReport]) -> list[Any]:
    return [asdict(report) for report in reports]


def reports_of(content: Sequence[Mapping[str, Any]]) -> tuple[PassReport, ...]:
    rows = ({**row, "notes": tuple(row["notes"]), "unmatched": tuple(row["unmatched"])} for row in content)
    return tuple(PassReport(**row) for row in rows)
