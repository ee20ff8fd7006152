"""Run a model's whole training step on the stages of a pipeline."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import torch

from autopar.costs.machine import Machine
from autopar.ir.mesh import PIPELINE
from autopar.model.calls import Calls
from autopar.page.subject import Subject
from autopar.step.batches.batches import MicroBatches
from autopar.step.options import StepOptions
from autopar.step.pipelined.captures import PipelinedCaptures
from autopar.step.pipelined.compiled import CompiledOnStages
from autopar.step.pipelined.reports.report import Pipeline
from autopar.step.pipelined.reports.timeline import PipelinedTimeline, on_one_clock
from autopar.step.pipelined.schedules import schedule_of
from autopar.step.reports.paged import subject_of_stages
from autopar.step.train_step import TrainStep


class PipelinedStep(TrainStep):
    """A training step whose model is cut into stages; made by ``parallel.train_step(…, schedule="1f1b")``.

    The attributes are those of ``TrainStep``.
    """

    def __init__(
        self, parallel: torch.nn.Module, calls: Calls, optimizer: torch.optim.Optimizer, options: StepOptions
    ) -> None:
        schedule_of(options, calls.mesh)  # refused before anything runs
        super().__init__(parallel, calls, optimizer, options)

    def _captures_of(self, batches: MicroBatches, options: StepOptions) -> PipelinedCaptures:
        return PipelinedCaptures(self._calls, self.optimizer_state, self.averages, batches, options, self._forget)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run one step, as ``TrainStep``. ``RuntimeError`` if one has failed on this rank before."""
        self._here.refuse_after_failure()
        return super().__call__(*args, **kwargs)

    @property
    def pipeline(self) -> Pipeline:
        """The stages and the schedule, which ``.simulate()`` simulates. ``RuntimeError`` before a capture."""
        made = self._current()
        assert isinstance(made, CompiledOnStages)
        return made.pipeline

    def page_subject(self, machine: Machine | str | Path | None = None) -> Subject:
        """Return what the page of the step shows, as data. ``RuntimeError`` before a capture."""
        return subject_of_stages(self, self._calls, machine)

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
