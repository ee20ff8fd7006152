"""Run a model's whole training step on the stages of a pipeline."""

from __future__ import annotations

from typing import Any

import torch

from autopar.errors import shown
from autopar.model.calls import Calls
from autopar.report.passes import Reports
from autopar.step.batches import MicroBatches
from autopar.step.compiled_step import about
from autopar.step.options import StepOptions
from autopar.step.pipelined.captures import PipelinedCaptures
from autopar.step.pipelined.programs import PipelinedMicro
from autopar.step.pipelined.runs import PipelinedOnProcess, PipelinedSimulated
from autopar.step.pipelined.schedules import schedule_of
from autopar.step.pipelined.step import PipelinedPrograms
from autopar.step.pipelined.update import PipelinedUpdate
from autopar.step.train_step import TrainStep

REFUSED = {"across": "a pipelined step ends complete", "offload": "the stages keep their state on their devices"}


class PipelinedStep(TrainStep):
    """A training step whose model is cut into stages; made by ``parallel.train_step(…, schedule="1f1b")``.

    The attributes are those of ``TrainStep``.
    """

    def __init__(
        self, parallel: torch.nn.Module, calls: Calls, optimizer: torch.optim.Optimizer, options: StepOptions
    ) -> None:
        for option, why in REFUSED.items():
            if getattr(options, option):
                raise ValueError(f"{option}= with schedule={shown(options.schedule)}: {why}; leave {option}= out")
        if options.joins is not None:
            raise ValueError(
                "returns= with schedule=: the outputs of a pipelined step stay on the stages that make them; use "
                'returns="loss", and parallel(...) under torch.no_grad() for outputs'
            )
        if options.opened:
            raise ValueError(f'{options.opened[0]}="search" with schedule=: give a value')
        schedule_of(options, calls.mesh)  # refused before anything runs
        super().__init__(parallel, calls, optimizer, options)

    def _runs(self) -> Any:
        return PipelinedOnProcess(self._calls), PipelinedSimulated(self._calls)

    def _captures_of(self, batches: MicroBatches, options: StepOptions) -> PipelinedCaptures:
        return PipelinedCaptures(self._calls, self.optimizer_state, self.averages, batches, options, self._forget)

    def _now(self) -> tuple[PipelinedMicro, PipelinedUpdate]:
        micro: Any
        update: Any
        micro, update = self._current()
        return micro, update

    @property
    def program(self) -> Any:
        """The explicit programs of all stages. Prints as text. ``RuntimeError`` before a capture."""
        return PipelinedPrograms(*self._now())

    @property
    def reports(self) -> Reports:
        """The report of each pass, stage by stage. Prints as a table. ``RuntimeError`` before a capture."""
        micro, update = self._now()
        return Reports((*micro.reports, *about("update", update.reports)))

    @property
    def solution(self) -> None:
        """``None``: the plan of a pipelined step is not searched."""
        return None

    def _text(self) -> str:
        micro, _ = self._now()
        orders = [stage.local.order.text for stage in micro.stages if stage.local.order is not None]
        return "\n".join((str(self.program), str(micro.schedule), *orders))
