"""Choose the mesh of a model: capture one call, and search its cheapest plan on each mesh of so many devices."""

from __future__ import annotations

import json
from typing import Any

import torch

from autopar.capture import capture
from autopar.costs.machine import Machine
from autopar.ir.mesh import Mesh
from autopar.plan.boundary import Boundary
from autopar.report.progress import doing
from autopar.runtime.processes.agreement import Agreement
from autopar.search.devices.meshes import Devices, MeshRow, best_mesh
from autopar.search.search import search
from autopar.search.solutions.artifact import from_json
from autopar.search.solutions.found import Found
from autopar.search.solutions.solution import Solution, solution_from


def choose_mesh(
    devices: Devices,
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    machine: Machine,
    *,
    whole: bool = False,
    strict: bool = False,
    time_limit: float = 60.0,
    memory: float | None = None,
    agreement: Agreement | None = None,
) -> tuple[Solution, str]:
    """Return the cheapest plan of a call, whose mesh is the chosen one, and a sentence about the others.

    On processes the first rank searches, and all ranks call it.

    Args:
        args, kwargs: of the call.
        machine: the machine whose seconds decide.
        whole: whether returned values are gathered.
        strict: whether ops without a rule are refused.
        time_limit: seconds for all meshes.
        memory: the most bytes that a rank may use; by default the capacity of the machine.
        agreement: the ranks; ``None`` in one process.
    """
    if agreement is None:
        return _chosen(devices.count, model, args, kwargs, machine, whole, strict, time_limit, memory)
    text = note = ""
    if agreement.rank == 0:
        solution, note = _chosen(devices.count, model, args, kwargs, machine, whole, strict, time_limit, memory)
        text = json.dumps(solution.to_json())
    text, note = agreement.gathered((text, note))[0]
    return from_json(json.loads(text)), note


def _chosen(
    count: int,
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    machine: Machine,
    whole: bool,
    strict: bool,
    time_limit: float,
    memory: float | None,
) -> tuple[Solution, str]:
    program = capture(model, args, kwargs).program

    def find(mesh: Mesh, seconds: float) -> Found:
        program.mesh = mesh
        with doing(f"search on {mesh}"):
            boundary = Boundary(program, mesh, {}, whole)
            return search(boundary, machine, strict=strict, time_limit=seconds, memory=memory)

    mesh, found, rows = best_mesh(count, find, time_limit)
    program.mesh = mesh
    return solution_from(found, program, mesh, "call"), _about(mesh, rows)


def _about(mesh: Mesh, rows: tuple[MeshRow, ...]) -> str:
    """Say which meshes were compared."""
    priced = sorted(
        ((row.nanoseconds, row.mesh) for row in rows if row.nanoseconds is not None), key=lambda row: row[0]
    )
    others = [f"({other}) {nanoseconds / 1e6:,.3f} ms" for nanoseconds, other in priced if other != mesh]
    missing = [row for row in rows if row.nanoseconds is None]
    said = f"the mesh ({mesh}) is the fastest of {len(priced)}" if len(rows) > 1 else f"the only mesh is ({mesh})"
    if others:
        said += f"; the others: {', '.join(others)}"
    if missing:
        said += f"; {len(missing)} more have no plan, as ({missing[0].mesh}): {missing[0].note}"
    return said
