"""Choose the mesh of a model: capture one call, and search its cheapest plan on each mesh of so many devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from autopar.cache.cache import Cache
from autopar.cache.codec import Check, Codec
from autopar.cache.described import described_options
from autopar.capture import capture
from autopar.capture.arguments import bind_arguments
from autopar.capture.guards import Guards
from autopar.costs.machine import Machine
from autopar.ir.mesh import Mesh
from autopar.model.inputs import CallInputs
from autopar.model.kept_calls import facts_of_inputs, facts_of_model, fields_of
from autopar.plan.boundary import Boundary
from autopar.report.passes import PassReport
from autopar.report.progress import doing
from autopar.runtime.processes.agreement import Agreement
from autopar.search.devices.meshes import Devices, MeshRow, best_mesh
from autopar.search.search import search
from autopar.search.solutions.artifact import from_json
from autopar.search.solutions.found import Found
from autopar.search.solutions.solution import Solution, solution_from


class ChosenMesh(NamedTuple):
    """The cheapest plan of a call on the chosen mesh.

    Attributes:
        solution: the plan; its mesh is the chosen one.
        note: a sentence about the other meshes.
        guards: those of the capture that was searched.
    """

    solution: Solution
    note: str
    guards: Guards


@dataclass(frozen=True)
class MeshChoice:
    """The request for a mesh, and what the search may use.

    Attributes:
        devices: how many ranks.
        args, kwargs: of the call.
        machine: the machine whose seconds decide.
        whole: whether returned values are gathered.
        strict: whether ops without a rule are refused.
        time_limit: seconds for all meshes.
        memory: the most bytes that a rank may use; by default the capacity of the machine.
        keep: whether the first value is kept of what a captured step does not repeat.
    """

    devices: Devices
    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    machine: Machine
    whole: bool = False
    strict: bool = False
    time_limit: float = 60.0
    memory: float | None = None
    keep: bool = False

    def best(
        self, agreement: Agreement | None = None, cache: Cache | None = None
    ) -> tuple[ChosenMesh, PassReport | None]:
        """Return the chosen mesh, and a report that says what the cache had; ``None`` without one.

        In a job the first rank searches, and all ranks call it.

        Args:
            agreement: the ranks; ``None`` in one process.
            cache: where choices are kept.
        """
        if cache is None:
            return self._made(agreement, None), None
        made, report, _ = cache.through(self._made, self._codec(), agreement)
        return made, replace(report, name="cache of the mesh")

    def _codec(self) -> Codec[ChosenMesh]:
        """Return how the choice is kept."""
        inputs = CallInputs(bind_arguments(self.model, self.args, self.kwargs), {}, {})
        return Codec(
            kind="mesh",
            model=self.model,
            facts=lambda: {
                "model": facts_of_model(self.model),
                "call": facts_of_inputs(self.model, inputs),
                "options": described_options(fields_of(self, ("model", "args", "kwargs"))),
            },
            guards=lambda chosen: chosen.guards,
            write=lambda chosen: {"solution": chosen.solution.to_json(), "note": chosen.note},
            read=lambda content, guards: ChosenMesh(from_json(content["solution"]), content["note"], guards),
        )

    def _made(self, agreement: Agreement | None, check: Check | None) -> ChosenMesh:
        if agreement is None:
            return self._searched(check)
        guards = Guards((), ())

        def plan() -> tuple[Any, str]:
            nonlocal guards
            solution, note, guards = self._searched(check)
            return solution.to_json(), note

        content, note = agreement.of_first(plan)
        return ChosenMesh(from_json(content), note, guards)

    def _searched(self, check: Check | None) -> ChosenMesh:
        captured = capture(self.model, self.args, self.kwargs, keep=self.keep)
        if check is not None:
            check(captured)
        program = captured.program

        def find(mesh: Mesh, seconds: float) -> Found:
            program.mesh = mesh
            with doing(f"search on {mesh}"):
                boundary = Boundary(program, mesh, {}, self.whole)
                return search(boundary, self.machine, strict=self.strict, time_limit=seconds, memory=self.memory)

        mesh, found, rows = best_mesh(self.devices.count, find, self.time_limit)
        program.mesh = mesh
        return ChosenMesh(solution_from(found, program, mesh, "call"), _about(mesh, rows), captured.guards)


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
