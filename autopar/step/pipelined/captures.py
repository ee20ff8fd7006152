"""Capture pipelined steps, and keep them by call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from autopar.cache.records import given
from autopar.capture.guards import GuardedCall
from autopar.ir.program import Program
from autopar.model.compiled import Compiler
from autopar.model.inputs import CallInputs
from autopar.pipeline import PipelineSchedule
from autopar.step.captures import StepCaptures
from autopar.step.compiling.compiled_step import StepUpdate
from autopar.step.compiling.update import Trained
from autopar.step.kept_steps import codec_of_micro, codec_of_update
from autopar.step.pipelined.placing.compile import compile_pipelined
from autopar.step.pipelined.placing.programs import PipelinedMicro
from autopar.step.pipelined.placing.update import compile_pipelined_update
from autopar.step.pipelined.reports.rank_memory import check_within
from autopar.step.pipelined.schedules import schedule_of


class PipelinedCaptures(StepCaptures):
    """The programs of a pipelined step, by call. They are cut into stages when they are captured."""

    @cached_property
    def schedule(self) -> PipelineSchedule:
        """The schedule of the step."""
        return schedule_of(self._options, self._calls.mesh)

    def _compile(
        self, inputs: CallInputs, call: GuardedCall, compiler: Compiler, notes: Sequence[str], same_numbers: bool
    ) -> Any:
        _, trained, cut = call.key
        mesh, options, schedule, updates = (
            self._calls.mesh, self._options, self.schedule, self._optimizer_state.updates()
        )  # fmt: skip

        def make(compiler: Compiler) -> PipelinedMicro:
            return compile_pipelined(compiler, mesh, inputs, options, schedule, trained, updates, cut, notes)

        micro, digest = compiler.once(make, lambda: codec_of_micro(
            "stages", PipelinedMicro, compiler, inputs, options, call.key, updates, notes,
            {PipelineSchedule: given(schedule)}))  # fmt: skip
        return replace(micro, digest=digest)

    def _compile_update(self, compiler: Compiler, trained: Sequence[Trained], micro: Any) -> StepUpdate:
        update, _ = compiler.once(
            lambda compiler: compile_pipelined_update(compiler, trained, micro, self._options),
            lambda: codec_of_update("update of stages", StepUpdate, compiler, micro.digest, trained, self._options),
        )
        check_within(compiler.planner.memory, micro, update, self._options.offload)
        return update

    def _move(self, micro: Any) -> None:
        self._calls.captures.move_to_stages(micro.stage_homes)

    @staticmethod
    def _programs(micro: Any) -> list[Program]:
        made: PipelinedMicro = micro
        gathers = [stage.micro.copy for stage in made.stages if stage.micro.copy is not None]
        return [made.program, *(program for program, _ in (*gathers, *made.around.values()))]
