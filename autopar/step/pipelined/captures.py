"""Capture pipelined steps, and keep them by call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from autopar.cache.records import Leaf
from autopar.capture.guards import GuardedCall
from autopar.model.compiled import Compiler
from autopar.model.inputs import CallInputs
from autopar.pipeline import PipelineSchedule
from autopar.step.captures import StepCaptures
from autopar.step.compiled import AnyStep
from autopar.step.compiling.compiled_step import CompiledMicro, StepUpdate
from autopar.step.compiling.update import Trained
from autopar.step.kept_steps import codec_of_update
from autopar.step.pipelined.compiled import CompiledOnStages
from autopar.step.pipelined.placing.compile import compile_pipelined
from autopar.step.pipelined.placing.programs import PipelinedMicro
from autopar.step.pipelined.placing.update import compile_pipelined_update
from autopar.step.pipelined.schedules import schedule_of


class PipelinedCaptures(StepCaptures):
    """The programs of a pipelined step, by call. They are cut into stages when they are captured."""

    kind: ClassVar[str] = "stages"
    record: ClassVar[type[CompiledMicro]] = PipelinedMicro

    @cached_property
    def schedule(self) -> PipelineSchedule:
        """The schedule of the step."""
        return schedule_of(self._options, self._calls.mesh)

    def _made(
        self, inputs: CallInputs, call: GuardedCall, compiler: Compiler, notes: Sequence[str], same_numbers: bool
    ) -> PipelinedMicro:
        _, trained, cut = call.key
        # the price of a stage is no bound of a step's simulated time, in which transfers are hidden
        compiler = replace(compiler, planner=replace(compiler.planner, below=math.inf))
        return compile_pipelined(
            compiler, self._calls.mesh, inputs, self._options, self.schedule, trained, self.optimizer_updates(), cut,
            notes, same_numbers=same_numbers,
        )  # fmt: skip

    def _leaves(self) -> Mapping[Any, Leaf]:
        return {PipelineSchedule: Leaf(lambda _: None, lambda _: self.schedule)}

    def _compile_update(self, compiler: Compiler, trained: Sequence[Trained], micro: CompiledMicro) -> AnyStep:
        assert isinstance(micro, PipelinedMicro)
        update, _ = compiler.once(
            lambda compiler: compile_pipelined_update(compiler, trained, micro, self._options),
            lambda: codec_of_update("update of stages", StepUpdate, compiler, micro.digest, trained, self._options),
        )
        return CompiledOnStages(micro, update, self._options, self._calls, self.compiler())
