"""Run a model's whole training step on the stages of a pipeline."""

from __future__ import annotations

from pathlib import Path

from autopar.costs.machine import Machine
from autopar.page.subject import Subject
from autopar.step.pipelined.compiled import CompiledOnStages
from autopar.step.pipelined.reports.report import Pipeline
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
