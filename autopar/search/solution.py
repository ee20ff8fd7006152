"""Hold the plan that a search found, with its certificate; it prints as a table, and can be saved."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.search.certificate import Certificate
from autopar.search.module_times import ModuleTime, module_times

VERSION = 1  # of the file format


@dataclass(frozen=True)
class Planned:
    """The layouts of one op or placeholder, as programs print them: ``[256/tp 64] +dp``.

    Attributes:
        gives: of each result; ``None`` for a result that the op does not make.
        needs: of each operand, as the op reads it.
    """

    gives: tuple[str | None, ...]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Solution(Certificate):
    """The cheapest plan that a search found, and how far from the cheapest of all it can be. Prints as a table.

    Attributes:
        mesh: the mesh.
        graph: the digest of the traced program.
        values: name of a value → its layouts; ``value_names`` gives the names.
        modules: what each module takes.
    """

    mesh: Mesh
    graph: str
    values: Mapping[str, Planned] = field(repr=False)
    modules: Sequence[ModuleTime] = field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        if not self.modules:
            return f"{self.certificate}\n"
        table = Table("module", "parameters → result", _right("ops µs"), _right("transfers µs"))
        for row in self.modules:
            table.add_row(row.module, row.layouts, f"{row.ops / 1e3:,.1f}", f"{row.transfers / 1e3:,.1f}")
        out = io.StringIO()
        Console(file=out, width=120).print(table)
        return f"{out.getvalue()}{self.certificate}\n"

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON, without the times of modules."""
        return {
            "version": VERSION, "mesh": dict(self.mesh.axes), "graph": self.graph,
            "machine": self.machine.description(), "nanoseconds": self.nanoseconds, "least": self.least,
            "search_seconds": self.search_seconds, "reason": self.reason,
            "values": {name: {"gives": [*v.gives], "needs": [*v.needs]} for name, v in self.values.items()},
        }  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file, which ``plan=`` of ``parallelize`` takes."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")


def timed(solution: Solution, program: Program) -> Solution:
    """Return a solution with the times of the modules of its explicit program."""
    return replace(solution, modules=module_times(program, solution.machine))


def _right(header: str) -> Column:
    return Column(header, justify="right")
