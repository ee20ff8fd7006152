"""Run a model's whole training step on the stages of a pipeline."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from autopar.costs.machine import Machine
from autopar.ir.mesh import PIPELINE
from autopar.page.subject import Subject
from autopar.step.pipelined.compiled import CompiledOnStages
from autopar.step.pipelined.reports.report import Pipeline
from autopar.step.pipelined.reports.timeline import PipelinedTimeline, on_one_clock
from autopar.step.reports.paged import subject_of_stages
from autopar.step.train_step import TrainStep


class PipelinedStep(TrainStep):
    """A training step whose model is cut into stages; made by ``parallel.train_step(…, schedule="1f1b")``.

    The attributes are those of ``TrainStep``.
    """

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
