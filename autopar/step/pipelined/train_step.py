"""Run a model's whole training step on the stages of a pipeline."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autopar.costs.machine import Machine
from autopar.costs.profile import Profile
from autopar.ir.mesh import PIPELINE
from autopar.model.calls import Calls
from autopar.page.subject import Subject
from autopar.runtime.measuring.clock import Effort
from autopar.runtime.running.messages import connect
from autopar.scheduling.programs.communication import Communication
from autopar.search.solutions.step_choice import StepChoice
from autopar.step.batches.batches import MicroBatches
from autopar.step.compiling.compiled_step import StepUpdate
from autopar.step.options import StepOptions
from autopar.step.pipelined.captures import PipelinedCaptures
from autopar.step.pipelined.placing.programs import PipelinedMicro
from autopar.step.pipelined.reports.measured import messages_of, placed_programs
from autopar.step.pipelined.reports.rank_memory import memory_of_rank
from autopar.step.pipelined.reports.report import Pipeline, communication_of
from autopar.step.pipelined.reports.timeline import PipelinedTimeline, on_one_clock, simulated_tracks, stages_text
from autopar.step.pipelined.runs import of_stages
from autopar.step.pipelined.schedules import schedule_of
from autopar.step.reports.measured import measured
from autopar.step.reports.paged import subject_of_stages
from autopar.step.reports.step_profile import Computed, Places
from autopar.step.running import StepRuns
from autopar.step.stages import stages_of
from autopar.step.train_step import TrainStep


class PipelinedStep(TrainStep):
    """A training step whose model is cut into stages; made by ``parallel.train_step(…, schedule="1f1b")``.

    The attributes are those of ``TrainStep``.
    """

    def __init__(
        self, parallel: torch.nn.Module, calls: Calls, optimizer: torch.optim.Optimizer, options: StepOptions
    ) -> None:
        if options.opened:
            opened = options.opened[0]
            raise ValueError(
                f'{opened}="search" with schedule=: the search is about steps without stages; give {opened}= a value, '
                f"and compare step.pipeline.simulate() of several"
            )
        schedule_of(options, calls.mesh)  # refused before anything runs
        super().__init__(parallel, calls, optimizer, options)

    def _made_runs(self, micro: Any, update: Any, microbatches: int) -> StepRuns:
        return of_stages(micro, update, self._calls.mesh)

    def _captures_of(self, batches: MicroBatches, options: StepOptions) -> PipelinedCaptures:
        return PipelinedCaptures(self._calls, self.optimizer_state, self.averages, batches, options, self._forget)

    def _now(self) -> tuple[PipelinedMicro, StepUpdate]:
        micro: Any
        update: Any
        micro, update = self._current()
        return micro, update

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step, as ``TrainStep``. ``RuntimeError`` if one has failed on this rank before."""
        self._here.refuse_after_failure()
        return super().__call__(*args, **kwargs)

    @property
    def pipeline(self) -> Pipeline:
        """The stages and the schedule, which ``.simulate()`` simulates. ``RuntimeError`` before a capture."""
        compiler = self._captured.compiler()
        figures = compiler.figures or compiler.machine or compiler.planner.machine
        return Pipeline.of(*self._now(), figures, compiler.overlap.issue)

    @property
    def communication(self) -> Communication:
        """How the collectives of each stage are scheduled, with a bound. Prints as a table.

        ``RuntimeError`` before a capture.
        """
        job, compiler = self._calls.job, self._captured.compiler()
        return communication_of(*self._now(), self.program, job is None or job.in_order, compiler.order_of_part)

    def page_subject(self, machine: Machine | str | Path | None = None) -> Subject:
        """Return what the page of the step shows, as data. ``RuntimeError`` before a capture."""
        return subject_of_stages(self, self._calls, machine)

    def memory(self, rank: int = 0) -> Any:
        """Return the bytes of one rank at the peak of its slots. Prints as a table.

        ``RuntimeError`` before a capture.
        """
        return memory_of_rank(*self._now(), self._calls.mesh, rank, self.options.offload)

    @property
    def choice(self) -> StepChoice:
        """How the step runs: micro-batches, recomputation, ZeRO. ``RuntimeError`` before a capture."""
        micro, _ = self._now()
        options = self._shown.way.options
        zero = {name: kind for stage in micro.stages for name, kind in stages_of(stage.micro).items()}
        return StepChoice(options.count, options.recompute, options.zero, zero, ())

    def _measured(self, machine: Machine | str | Path | None, effort: Effort | None, interference: bool) -> Profile:
        micro, _ = self._now()
        if self._calls.job is not None:
            connect(self._calls.device)
        programs = placed_programs(self.program)
        return measured(self._calls, programs, machine, effort, interference, partial(messages_of, micro))

    def timeline(self, *args: Any, **kwargs: Any) -> PipelinedTimeline:
        """Run one step and record when each slot begins and ends on each rank, beside the simulated slots.

        All ranks call it, as they call the step: parameters change. ``print`` shows a table, and ``.save(path)`` writes
        a trace for Perfetto. Errors are those of ``TrainStep.timeline``.
        """
        recorder, _ = self._recorded(*args, **kwargs)
        slots = recorder.slots[self._calls.context().rank]
        begun, recorded = zip(*self._gathered(((socket.gethostname(), recorder.begun), slots)), strict=True)
        positions = tuple(self._calls.mesh.coordinates(rank)[PIPELINE] for rank in self._calls.mesh.ranks)
        return PipelinedTimeline(self.pipeline.simulate(), on_one_clock(begun, recorded), positions)

    def _words(self, rank: int) -> str:
        position = self._calls.mesh.coordinates(rank)[PIPELINE]
        return f"rank {rank}, {stages_text(self._now()[0].schedule.stages_of[position])}"

    def _computed(self, made: Communication, places: Places) -> Computed:
        simulation = self.pipeline.simulate()
        between = max(simulation.exposed, default=0.0)
        return Computed(simulated_tracks(simulation), simulation.makespan, made.exposed + between, between)
