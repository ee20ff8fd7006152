"""Collect what the page of a call shows."""

from __future__ import annotations

from pathlib import Path

from autopar.costs.machine import Machine, machine_from
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import record_of
from autopar.model.compiled import Compiled
from autopar.page.subject import Part, Subject, batch_text
from autopar.report.memory import memory_of
from autopar.scheduling.programs.communication import Communication

STAGED = (
    "the model is on the stages of a pipeline, and only a training step has programs with costs there; take "
    "step.page(path), or step.figures(), after step.capture(batch)"
)


def subject_of_call(
    compiled: Compiled, name: str, mesh: Mesh, machine: Machine | str | Path, communication: Communication
) -> Subject:
    """Return what the page of a captured call shows. ``machine``: whose seconds are added up."""
    rank = mesh.ranks[0] if compiled.context is None else compiled.context.rank
    what = (
        "a call with its backward"
        if any(record_of(n).phase == "backward" for n in compiled.program.nodes)
        else "a call"
    )
    batch = f" of {inputs}" if (inputs := batch_text(compiled.program)) else ""
    return Subject(
        f"{name} on {mesh}: {what}{batch}", "a call", mesh, machine_from(machine), [Part("call", compiled.program)],
        compiled.reports, memory_of(compiled.local[rank]), solution=compiled.solution,
        communication=communication,
    )  # fmt: skip
