"""Collect what the page of a training step shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from autopar.costs.machine import Machine, machine_from
from autopar.ir.program import Program
from autopar.model.calls import Calls
from autopar.page.subject import Part, Subject, batch_text
from autopar.report.passes import Reports
from autopar.search.solutions.solution import Solution, runs_of
from autopar.step.compiled import AnyStep
from autopar.step.options import StepOptions


class CapturedStep(Protocol):
    """A captured training step."""

    options: StepOptions
    optimizer: torch.optim.Optimizer

    @property
    def reports(self) -> Reports: ...
    @property
    def solution(self) -> object: ...


def subject_of_step(step: CapturedStep, made: AnyStep, calls: Calls, machine: Machine | str | Path | None) -> Subject:
    """Return what the page of a captured step shows. With stages, its seconds are those of the simulated slots.

    Args:
        made: its programs.
        machine: whose seconds the ops and transfers have, by default that of the plan; slots keep the figures by which
            they are scheduled.
    """
    compiler, program, pipeline = calls.compiler, made.program, made.pipeline
    planned = step.options.machine or compiler.machine or compiler.planner.machine
    found = step.solution
    solution = found if isinstance(found, Solution) else None
    if solution is not None:
        planned = solution.machine
    first = calls.mesh.ranks[0] if calls.job is None else calls.job.rank
    ranks = [first] if pipeline is None else [at.ranks[-1] for at in made.runs.timetable.positions]
    memory, rank = max(((made.memory(rank), rank) for rank in ranks), key=lambda row: row[0].peak)
    name = f"{type(calls.module).__name__} on {calls.mesh}: a training step with {type(step.optimizer).__name__}"
    shown = Subject(
        name, runs_of(program.microbatches), calls.mesh, machine_from(machine or planned),
        [Part(name, *run) for name, run in program.parts.items()], step.reports,
        memory, solution=solution,
    )  # fmt: skip
    if pipeline is None:
        title = f"{name}, {_batches(program.microbatches, program.micro)}"
        return replace(shown, title=title, communication=made.communication)
    simulated = pipeline.simulate()
    of_all = [Part(name, *run) for name, run in program.runs.items() if name not in ("micro", "sums")]
    notes = (
        f"the memory is that of rank {rank}, which needs most",
        "the seconds of a step are those of its slots; the update is not part of them",
    )
    return replace(
        shown, title=f"{name}, {simulated.schedule.title}", seconds=simulated.makespan, pipeline=simulated,
        messages=pipeline.messages(simulated), between=of_all, notes=notes,
    )  # fmt: skip


def _batches(count: int, micro: Program) -> str:
    """Return the micro-batches of a step with their inputs: ``2 micro-batches, each x f32[8 64]``."""
    batch = batch_text(micro)
    return f"{count} micro-batch{'es' * (count != 1)}" + (
        f"{', each' if count > 1 else ' of'} {batch}" if batch else ""
    )
