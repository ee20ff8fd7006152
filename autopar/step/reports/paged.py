"""Collect what the page of a training step shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from autopar.costs.machine import Machine, machine_from
from autopar.ir.mesh import PIPELINE
from autopar.ir.program import Program
from autopar.model.calls import Calls
from autopar.model.paged import use_of
from autopar.page.subject import Messages, Part, RankUse, Subject, batch_text
from autopar.report.passes import Reports
from autopar.scheduling.programs.communication import Communication
from autopar.search.solutions.solution import Solution, runs_of
from autopar.step.options import StepOptions
from autopar.step.pipelined.solution import PipelinedSolution


class CapturedStep(Protocol):
    """A captured training step, on a mesh or on stages."""

    options: StepOptions
    optimizer: torch.optim.Optimizer

    @property
    def program(self) -> Any: ...
    @property
    def reports(self) -> Reports: ...
    @property
    def solution(self) -> Solution | PipelinedSolution | None: ...
    @property
    def communication(self) -> Communication: ...
    def memory(self, rank: int = 0) -> Any: ...


class StagedStep(CapturedStep, Protocol):
    """A captured step on the stages of a pipeline."""

    @property
    def pipeline(self) -> Any: ...


def subject_of_step(step: CapturedStep, calls: Calls, machine: Machine | str | Path | None) -> Subject:
    """Return what the page of a captured step shows. ``machine``: by default that of the plan."""
    solution, compiler = step.solution, calls.compiler
    assert not isinstance(solution, PipelinedSolution)
    planned = step.options.machine or compiler.machine or compiler.planner.machine
    if solution is not None:
        planned = solution.machine
    parts = [Part(name, program, times) for name, (program, times) in step.program.runs.items()]
    memory, count = step.memory(calls.mesh.ranks[0] if calls.job is None else calls.job.rank), step.program.microbatches
    return Subject(
        f"{_name(step, calls)}, {_batches(count, step.program.micro)}", runs_of(count), calls.mesh,
        machine_from(machine or planned), parts, step.reports,
        use_of(memory, memory.peak, memory.lifetimes, memory.beside), solution=solution,
        communication=step.communication,
    )  # fmt: skip


def subject_of_stages(step: StagedStep, calls: Calls, machine: Machine | str | Path | None) -> Subject:
    """Return what the page of a pipelined step shows. Its seconds are those of the simulated slots.

    ``machine``: whose seconds the ops and transfers have; slots keep the figures by which they are scheduled.
    """
    compiler, mesh = calls.compiler, calls.mesh
    parts = [
        Part(f"stage {number} {name}", program, times)
        for number, stage in enumerate(step.program.stages)
        for name, (program, times) in stage.runs.items()
    ]
    memories = [step.memory(rank) for rank in {mesh.coordinates(rank)[PIPELINE]: rank for rank in mesh.ranks}.values()]
    most = max(memories, key=lambda memory: memory.peak)
    pipeline = step.pipeline
    simulated = pipeline.simulate()
    sent = [
        Messages(stage.number, phase, len(spans), len(spans) * bytes, sum(span.end - span.start for span in spans))
        for stage in pipeline.stages
        for phase, of, bytes in (("forward", "F", stage.sent), ("backward", "B", stage.sent_back))
        if (spans := [span for span in simulated.sent if span.op.stage == stage.number and span.op.of == of])
    ]
    return Subject(
        f"{_name(step, calls)}, {simulated.schedule.title}", runs_of(step.program.microbatches), mesh,
        machine_from(machine or step.options.machine or compiler.machine or compiler.planner.machine), parts,
        step.reports, RankUse(most.peak, {"the slots": dict(most.kinds)}), seconds=simulated.makespan,
        pipeline=simulated, messages=sent, between=[
            Part(name, program, 1) for name, program in step.program.programs.items() if name not in ("micro", "sums")
        ], notes=[f"the memory is that of rank {most.rank}, which needs most",
                                   "the seconds of a step are those of its slots; the update is not part of them"],
    )  # fmt: skip


def _batches(count: int, micro: Program) -> str:
    """Return the micro-batches of a step with their inputs: ``2 micro-batches, each x f32[8 64]``."""
    batch = batch_text(micro)
    return f"{count} micro-batch{'es' * (count != 1)}" + (
        f"{', each' if count > 1 else ' of'} {batch}" if batch else ""
    )


def _name(step: CapturedStep, calls: Calls) -> str:
    return f"{type(calls.module).__name__} on {calls.mesh}: a training step with {type(step.optimizer).__name__}"
