"""Hold the programs of a step that were compiled for a call, and what they say of the step: on a mesh, or on stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from autopar.costs.machine import Machine
from autopar.costs.profile import Profile
from autopar.costs.program_price import price
from autopar.model.calls import Calls
from autopar.model.compiled import Compiler
from autopar.pipeline import PipelineSchedule
from autopar.pipeline.simulate import Simulation
from autopar.report.passes import PassReport
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.measuring.between_stages import BetweenStages
from autopar.runtime.measuring.clock import Effort
from autopar.runtime.measuring.measure import Placed
from autopar.scheduling.programs.communication import Communication
from autopar.scheduling.programs.order import Order
from autopar.search.certificate import TOLERANCE
from autopar.search.solutions.solution import Solution, priced
from autopar.search.solutions.step_choice import Candidate, StepChoice
from autopar.step.compiling.compiled_step import (
    CompiledMicro,
    MicroBatch,
    StepUpdate,
    rank_step_of,
    reports_of,
    step_of,
)
from autopar.step.compiling.memory_limit import memory_of_programs
from autopar.step.options import StepOptions
from autopar.step.pipelined.reports.report import Pipeline
from autopar.step.pipelined.solution import PipelinedSolution
from autopar.step.program import RankStep, Step
from autopar.step.reports.measured import measured, placed_programs
from autopar.step.reports.memory import StepMemory
from autopar.step.reports.rank_report import RankPart
from autopar.step.running import StepRuns, of_one_stage
from autopar.step.solution import price_alike, solution_of
from autopar.step.stages import stages_of

M = TypeVar("M", bound=CompiledMicro, covariant=True)


SIDE_BY_SIDE = "the functions of different stages run at the same time; step.pipeline.simulate() has the whole step"


class StepCost(NamedTuple):
    """What a step costs, to compare it with others.

    Attributes:
        nanoseconds: the price of its explicit programs; of a step on stages, the simulated time.
        least: a lower bound for all plans with these options; 0 if none is known.
        alike: the part of the price that the search does not count, because it is the same for all plans.
        bytes: the most that a rank uses.
        proven: whether the search has proven its plan, or there was nothing to search.
    """

    nanoseconds: int
    least: float
    alike: int
    bytes: int
    proven: bool


@dataclass(frozen=True, eq=False)
class CompiledStep(ABC, Generic[M]):
    """The programs of a step that were compiled for a call.

    Attributes:
        micro: those of a micro-batch.
        update: those that end the step.
        options: of the step, without open ones.
        calls: of the model.
        compiler: the compiler of the step.
    """

    micro: M
    update: StepUpdate
    options: StepOptions
    calls: Calls
    compiler: Compiler

    @property
    def pair(self) -> tuple[M, StepUpdate]:
        """The programs of a micro-batch, and those that end the step."""
        return self.micro, self.update

    def choice(self, candidates: tuple[Candidate, ...]) -> StepChoice:
        """Return how the step runs. ``candidates``: what it was compared with."""
        options = self.options
        return StepChoice(options.count, options.recompute, options.zero, self.zero, candidates)

    @cached_property
    def program(self) -> Step:
        """The explicit programs."""
        return step_of(self.micro, self.update, self.options.count)

    @property
    def reports(self) -> tuple[PassReport, ...]:
        """What each pass did."""
        return reports_of(self.micro, self.update)

    @property
    @abstractmethod
    def zero(self) -> Mapping[str, int]:
        """Trained parameter → its stage of ZeRO."""

    @property
    @abstractmethod
    def cost(self) -> StepCost:
        """What the step costs."""

    @abstractmethod
    def solution(self, choice: StepChoice, words: str) -> Solution | PipelinedSolution | None:
        """Return the searched plan with its certificate; ``None`` if it was not searched.

        Args:
            choice: how the step runs.
            words: the optimizer and the options of the step.
        """

    @property
    @abstractmethod
    def runs(self) -> StepRuns:
        """What the step runs."""

    @property
    def text(self) -> str:
        """The programs, what runs, and the order, as text that ranks compare."""
        running = self.micro.running(self.update, 3)
        orders = "\n".join(f"{name}:\n{_order(local).text}" for name, (local, _) in running.items())
        return f"{self.program}\n{self.runs.timetable}\n{orders}"

    @property
    def parts(self) -> dict[str, tuple[LocalPrograms, int]]:
        """The programs that the step runs, in order, each with how often it runs."""
        return self.micro.running(self.update, self.options.count)

    @property
    def running(self) -> dict[str, LocalPrograms]:
        """The programs that the step runs, by the names of the parts of its communication."""
        return {name: local for name, (local, _) in self.parts.items()}

    def parts_of(self, rank: int) -> dict[str, RankPart]:
        """Return the programs that a rank runs, in order."""
        parts = self.parts.items()
        return {name: RankPart(local[rank], local.order, times) for name, (local, times) in parts if rank in local}

    def local(self, rank: int) -> RankStep:
        """Return what one rank runs."""
        self.calls.mesh.coordinates(rank)  # refused if the rank is not on the mesh
        return rank_step_of(self.micro, self.update, self.options.count, rank)

    @property
    @abstractmethod
    def orders(self) -> Mapping[str, tuple[Order, int]]:
        """The parts of the communication, by name: the order of a program, and how often it runs."""

    @property
    def communication(self) -> Communication:
        """How the communication of the whole step is scheduled."""
        in_order = self.calls.job is None or self.calls.job.in_order
        note = self.update.note if self.micro.stage_homes is None else SIDE_BY_SIDE
        return Communication.of(self.orders, in_order=in_order, notes=(note,) if note else ())

    @abstractmethod
    def memory(self, rank: int) -> StepMemory:
        """Return the bytes of one rank at its peaks."""

    def check_memory(self) -> None:
        """Raise ``MemoryLimitError`` if stages take more than the limit; without stages, the search keeps it."""

    @property
    def placed(self) -> dict[str, Placed]:
        """The programs whose calls are timed, as of ``placed_programs``."""
        return placed_programs(self.program, {})

    def between(self, machine: Machine) -> Sequence[BetweenStages]:
        """Return the messages between stages, with their prices on a machine."""
        return ()

    def measured(self, machine: Machine | str | Path | None, effort: Effort | None, interference: bool) -> Profile:
        """Time the calls of the step. Arguments and errors are those of ``TrainStep.measure``."""
        return measured(self.calls, self.placed, self.between, machine, effort, interference)

    @property
    def pipeline(self) -> Pipeline | None:
        """The stages and the schedule; ``None`` without stages."""
        return None

    @property
    def simulation(self) -> Simulation[PipelineSchedule] | None:
        """The simulated slots of the schedule; ``None`` without stages."""
        pipeline = self.pipeline
        return None if pipeline is None else pipeline.simulate()


AnyStep = CompiledStep[CompiledMicro]


class CompiledOnMesh(CompiledStep[MicroBatch]):
    """The programs of a step without stages."""

    @property
    def zero(self) -> Mapping[str, int]:
        """Trained parameter → its stage of ZeRO."""
        return stages_of(self.micro)

    @property
    def cost(self) -> StepCost:
        """What the step costs: the price of its explicit programs."""
        machine, found = self.compiler.planner.machine, self.micro.found
        nanoseconds, alike = price(self.program, machine).nanoseconds, price_alike(self.program, machine)
        # a plan that was searched before has the bound of its whole step
        least = nanoseconds if found is None else min(found.least + (alike if found.alike is None else 0), nanoseconds)
        return StepCost(nanoseconds, float(least), alike, self.memory(0).peak, least > nanoseconds - TOLERANCE)

    def solution(self, choice: StepChoice, words: str) -> Solution | None:
        """Return the searched plan of the step with its certificate; ``None`` if it was not searched."""
        if self.micro.found is None:
            return None
        step = self.program
        found = solution_of(replace(self.micro.found, step=choice), step, words)
        programs = [(times, program) for program, times in step.runs.values()]
        return priced(found, programs, self.micro.captured.at_sizes, step.microbatches)

    @cached_property
    def runs(self) -> StepRuns:
        """What the step runs."""
        return of_one_stage(self.micro, self.update, self.options.count, self.calls.mesh)

    @property
    def orders(self) -> Mapping[str, tuple[Order, int]]:
        """The orders of the programs that the step runs."""
        return {name: (_order(local), times) for name, (local, times) in self.parts.items()}

    def memory(self, rank: int) -> StepMemory:
        """Return the bytes of one rank at the peak of each phase."""
        return memory_of_programs(self.micro, self.update, self.options, rank, self.calls.device.type == "cpu")

    @property
    def placed(self) -> dict[str, Placed]:
        """The programs whose calls are timed, the merged ones too."""
        merged = {"first": self.micro.first, "last": self.update.last}
        return placed_programs(self.program, {name: placed[0] for name, placed in merged.items() if placed is not None})


def _order(local: LocalPrograms) -> Order:
    assert local.order is not None
    return local.order
