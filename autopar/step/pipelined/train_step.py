"""Run a model's whole training step on the stages of a pipeline."""

from __future__ import annotations

from autopar.step.pipelined.reports.report import Pipeline
from autopar.step.train_step import TrainStep


class PipelinedStep(TrainStep):
    """A training step whose model is cut into stages; made by ``parallel.train_step(…, schedule="1f1b")``.

    The attributes are those of ``TrainStep``.
    """

    @property
    def pipeline(self) -> Pipeline:
        """The stages and the schedule, which ``.simulate()`` simulates. ``RuntimeError`` before a capture."""
        pipeline = self._current().pipeline
        assert pipeline is not None
        return pipeline
