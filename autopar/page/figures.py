"""Stub of the figures."""

from __future__ import annotations

from typing import Any

from autopar.costs.machine import machine_of
from autopar.costs.program_price import price
from autopar.parallel import Parallel
from autopar.report.memory import memory_of
from autopar.report.transfers import priced
from autopar.costs.prices import price as _p


def figures(planned: Any, machine: Any = None) -> dict[str, Any]:
    solution = planned.solution
    machine = machine or (solution.machine if solution else machine_of("cpu"))
    ns = price(planned.program, machine).nanoseconds
    memory = memory_of(planned.local(0)) if isinstance(planned, Parallel) else planned.memory()
    programs = {"call": planned.program} if isinstance(planned, Parallel) else planned.program.programs
    rows = []
    from autopar.report.transfers import transfers_of

    for program in programs.values():
        for row in transfers_of(program):
            rows.append({"transfer": row.transfer, "axis": row.axis, "phase": row.phase, "module": row.module, "source": row.source, "times": row.times, "bytes": row.bytes, "seconds": 0.0})
    return {
        "seconds": ns / 1e9, "bound": solution.bound if solution else None, "gap": solution.gap if solution else None,
        "memory": {"peak": memory.peak, "phases": {row.phase: row.bytes for row in memory}},
        "transfers": rows,
        "modules": [{"module": m.module} for m in (solution.modules if solution else ())],
        "machine": {"name": machine.name},
    }
