"""Hold the programs of a step on stages that were compiled for a call, and what they say of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from autopar.costs.machine import Machine
from autopar.runtime.measuring.between_stages import BetweenStages
from autopar.runtime.running.messages import connect
from autopar.scheduling.programs.order import Order
from autopar.search.solutions.step_choice import StepChoice
from autopar.step.compiled import CompiledStep, StepCost
from autopar.step.pipelined.placing.programs import PipelinedMicro
from autopar.step.pipelined.reports.rank_memory import check_within, memory_of_rank
from autopar.step.pipelined.reports.report import Pipeline, orders_of_stages
from autopar.step.pipelined.reports.times import messages_of
from autopar.step.pipelined.runs import of_stages
from autopar.step.pipelined.solution import PipelinedSolution
from autopar.step.reports.memory import StageMemory
from autopar.step.running import StepRuns
from autopar.step.solution import solution_of
from autopar.step.stages import stages_of


class CompiledOnStages(CompiledStep[PipelinedMicro]):
    """The programs of a step on stages."""

    @property
    def pipeline(self) -> Pipeline:
        """The stages and the schedule."""
        compiler = self.compiler
        figures = compiler.figures or compiler.machine or compiler.planner.machine
        return Pipeline.of(self.micro, self.update, figures, compiler.overlap.issue, self._around)

    @property
    def zero(self) -> Mapping[str, int]:
        """Trained parameter → its stage of ZeRO."""
        return {name: kind for stage in self.micro.stages for name, kind in stages_of(stage.micro).items()}

    @property
    def cost(self) -> StepCost:
        """What the step costs: its simulated time. A bound is known where nothing was searched."""
        pipeline, found = self.pipeline, [stage.micro.found for stage in self.micro.stages]
        nanoseconds = round(pipeline.seconds * 1e9)
        proven = all(plan is None or plan.exact for plan in found)
        least = 0.0 if any(found) else float(nanoseconds)
        return StepCost(nanoseconds, least, 0, round(max(pipeline.simulate().peak)), proven)

    def solution(self, choice: StepChoice, words: str) -> PipelinedSolution | None:
        """Return the searched plans of the stages with their certificates; ``None`` if they were not searched."""
        stages = [
            solution_of(replace(stage.micro.found, step=choice), programs, words)
            for stage, programs in zip(self.micro.stages, self.program.stages, strict=True)
            if stage.micro.found is not None
        ]
        if not stages:
            return None
        return PipelinedSolution(tuple(stages), self.micro.schedule.title, self.pipeline.seconds, choice)

    @cached_property
    def runs(self) -> StepRuns:
        """What the step runs."""
        return of_stages(self.micro, self.update, self.calls.mesh)

    @property
    def orders(self) -> Mapping[str, tuple[Order, int]]:
        """The orders of the programs of each stage."""
        return orders_of_stages(self.micro, self.update, self.program, self.compiler.order_of_part)

    def _around(self) -> float:
        """Return the most seconds that a rank takes around the slots: for copies, counts, outputs and updates."""
        of_all = sum(
            times * made.makespan
            for name, (local, times) in self.parts.items()
            if name in ("sums", "count", "share") and local.order is not None
            for made in local.order.schedules
        )
        around: dict[str, float] = {}
        for part in self.communication.parts:
            stage, _, function = part.name.removeprefix("stage ").partition(" ")
            if function.startswith(("copy", "update", "turn")):
                around[stage] = around.get(stage, 0.0) + part.schedule.makespan
        return of_all + max(sum(around.get(str(stage), 0.0) for stage in own) for own in self.micro.schedule.stages_of)

    def memory(self, rank: int) -> StageMemory:
        """Return the bytes of one rank at the peak of its slots."""
        return memory_of_rank(self.micro, self.update, self.calls.mesh, rank, self.options.offload)

    def check_memory(self) -> None:
        """Raise ``MemoryLimitError`` if a rank takes more bytes than the option ``memory=`` allows."""
        check_within(self.compiler.planner.memory, self.micro, self.update, self.options.offload)

    def between(self, machine: Machine) -> Sequence[BetweenStages]:
        """Return the messages between stages, with their prices on a machine."""
        if self.calls.job is not None:
            connect(self.calls.device)
        return messages_of(self.micro, machine)
