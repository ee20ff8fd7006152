"""Hold the compiled programs of a step: those of a micro-batch, and those that end the step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, replace
from typing import Any, ClassVar, Protocol

from autopar.capture import Captured
from autopar.gc_pause import gc_paused
from autopar.ir.layout import DistAttr
from autopar.ir.nodes import operands
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.value_names import count_name
from autopar.model.compiled import Compiler
from autopar.model.stage_homes import StageHomes
from autopar.report.passes import PassReport
from autopar.runtime.localize import LocalPrograms
from autopar.scheduling.programs.order import Execution
from autopar.search.solutions.solution import Solution
from autopar.step.compiling.merged_programs import merge_programs
from autopar.step.compiling.outputs import Output
from autopar.step.compiling.update import Staged, Untrained, UpdateProgram
from autopar.step.program import RankStep, Step
from autopar.verify.levels import verify

Placed = tuple[Program, LocalPrograms]


class CompiledMicro(Protocol):
    """The programs of a micro-batch, on a mesh or on all stages."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def captured(self) -> Captured: ...
    @property
    def parameters(self) -> dict[str, TensorType]: ...
    @property
    def gradients(self) -> dict[str, TensorType]: ...
    @property
    def states(self) -> dict[str, DistAttr]: ...
    @property
    def outputs(self) -> tuple[Output, ...]: ...
    @property
    def reports(self) -> tuple[PassReport, ...]: ...
    @property
    def found(self) -> Solution | None: ...
    @property
    def digest(self) -> str: ...
    @property
    def explicit(self) -> list[Program]: ...
    @property
    def stage_homes(self) -> StageHomes | None: ...
    @property
    def policy(self) -> str: ...
    @property
    def program(self) -> Program: ...
    @property
    def loss(self) -> TensorType | None: ...
    @property
    def untrained(self) -> tuple[Untrained, ...]: ...
    @property
    def staged(self) -> Staged | None: ...
    def place_update(
        self, compiler: Compiler, ending: UpdateProgram, execution: Execution
    ) -> tuple[Placed, list[PassReport]]: ...
    def turned(self, ending: Program) -> tuple[Program, Program, Sequence[str]]: ...
    def ended(self, compiler: Compiler, ending: Placed, execution: Execution) -> tuple[Placed, list[PassReport]]: ...
    def programs(self, update: StepUpdate) -> dict[str, Placed]: ...
    def running(self, update: StepUpdate, microbatches: int) -> dict[str, tuple[LocalPrograms, int]]: ...


@dataclass(frozen=True)
class MicroBatch:
    """The programs of one micro-batch on the mesh.

    Attributes:
        captured: the call that was captured.
        program: ``micro`` with its transfers.
        local: ``micro`` of each rank.
        count: the program of the counts and its local programs; ``None`` if the step has none.
        copy: the program of the low-precision copies and its local programs; ``None`` if the step has none.
        first: ``count`` merged with the first of several micro-batches, and its local programs.
        parameters: the types of the trained parameters between steps, by the user's names.
        gradients: the types of the sums of their gradients.
        states: the layouts of their optimizer state.
        untrained: the other parameters whose gradients are measured.
        loss: the type of the state in which losses add up; ``None`` on a stage without a loss.
        outputs: the outputs of the model that ``micro`` returns.
        reports: what each pass did.
        found: the plan of the whole step, if it was searched.
        digest: that of the text in which other processes have it; "" if they have not.
    """

    captured: Captured
    program: Program
    local: LocalPrograms
    count: Placed | None
    copy: Placed | None
    first: Placed | None
    parameters: dict[str, TensorType]
    gradients: dict[str, TensorType]
    states: dict[str, DistAttr]
    untrained: tuple[Untrained, ...]
    loss: TensorType | None
    outputs: tuple[Output, ...]
    reports: tuple[PassReport, ...]
    found: Solution | None = None
    digest: str = ""

    policy: ClassVar[str] = ""  # it has no stages
    staged: ClassVar[None] = None

    @property
    def stage_homes(self) -> None:
        """``None``: its parameters are on the whole mesh."""
        return None

    @property
    def explicit(self) -> list[Program]:
        """The explicit programs."""
        return [self.program, *(placed[0] for placed in (self.count, self.copy, self.first) if placed is not None)]

    def place_update(
        self, compiler: Compiler, ending: UpdateProgram, execution: Execution
    ) -> tuple[Placed, list[PassReport]]:
        """Place the update behind the micro-batches."""
        local, reports = compiler.place(ending.program, ending.constraints, self.captured.device, execution=execution)
        return (ending.program, local), reports

    def turned(self, ending: Program) -> tuple[Program, Program, Sequence[str]]:
        """Return what the rotated step is made of: the first micro-batch with the counts of all, the update with the
        copies of parameters, and the names of the counts."""
        first = self.program if self.first is None else self.first[0]
        counted = [] if self.first is None or self.count is None else operands(self.count[0].output)
        with_copies = ending if self.copy is None else merge_programs(ending, self.copy[0])
        return first, with_copies, [count_name(k) for k in range(len(counted))]

    def ended(self, compiler: Compiler, ending: Placed, execution: Execution) -> tuple[Placed, list[PassReport]]:
        """Merge the last micro-batch with the update."""
        return merged(compiler, self.program, ending[0], execution=execution)

    def programs(self, update: StepUpdate) -> dict[str, Placed]:
        """Return the programs of a step, by name, in the order in which they run."""
        found = {"count": self.count, "copy": self.copy, "micro": (self.program, self.local)}
        return {name: placed for name, placed in found.items() if placed} | {"update": (update.program, update.local)}

    def running(self, update: StepUpdate, microbatches: int) -> dict[str, tuple[LocalPrograms, int]]:
        """Return the programs that a step runs, by name, in order, and how often each runs.

        They are the low-precision copies, the first micro-batch with the counts of all, the inner micro-batches, and
        the last one joined with the update. Where anything crosses the end of a step, the rotated step, ``turn``,
        replaces the first and the last one. It counts as one micro-batch, because the first runs its begin, and the
        last its end.
        """
        programs: dict[str, tuple[LocalPrograms, int]] = {}
        if update.crossing:
            first_step = {"copy": (self.copy[1], 0)} if self.copy is not None else {}
            inner = {"inner": (self.local, microbatches - 1)} if microbatches > 1 else {}
            return {**first_step, "turn": (update.last[1], 1), **inner}
        if self.copy is not None:
            programs["copy"] = self.copy[1], 1
        others = microbatches - 1
        if self.first is not None and others:
            programs["first"] = self.first[1], 1
            others -= 1
        if others:
            programs["inner"] = self.local, others
        return programs | {"last": (update.last[1], 1)}


@dataclass(frozen=True)
class StepUpdate:
    """The programs that end a step on the mesh.

    Attributes:
        program: the update with its transfers.
        local: the update of each rank.
        last: the last micro-batch merged with the update, and its local programs; the rotated step, if anything crosses
            the end of a step.
        states: the names of the states that the update replaces.
        returns: the names of the values that the update returns.
        reports: what each pass did.
        crossing: the collectives of ``last`` that are started in the step before.
        note: what crosses the end of a step, in words; empty if nothing may.
        sums: of the rotated step: placeholder of a sum of gradients or losses → the value that it becomes.
    """

    program: Program
    local: LocalPrograms
    last: Placed
    states: frozenset[str]
    returns: tuple[str, ...]
    reports: tuple[PassReport, ...]
    crossing: tuple[str, ...] = ()
    note: str = ""
    sums: Mapping[str, str] = field(default_factory=dict)

    @property
    def explicit(self) -> list[Program]:
        """The explicit programs."""
        return [self.last[0], self.program]


def step_of(micro: CompiledMicro, update: StepUpdate, microbatches: int) -> Step:
    """The programs of a micro-batch and an update, as one step."""
    programs = {name: program for name, (program, _) in micro.programs(update).items()}
    return Step(microbatches, programs, micro.policy)


def rank_step_of(micro: CompiledMicro, update: StepUpdate, microbatches: int, rank: int) -> RankStep:
    """Return the programs that one rank runs."""
    programs = micro.running(update, microbatches)
    if update.crossing and microbatches <= 2:
        programs.pop("inner", None)  # ``turn`` runs for both
    own = {name: local[rank] for name, (local, _) in programs.items() if rank in local}
    return RankStep(microbatches, own, micro.policy)


def reports_of(micro: CompiledMicro, update: StepUpdate) -> tuple[PassReport, ...]:
    """What each pass did. Passes over ``micro`` have their own names; those over other programs are called as ``update
    reshard``."""
    said = {note for row in micro.reports if row.name == "levels" for note in row.notes}
    rows = [replace(row, notes=tuple(note for note in row.notes if note not in said)) if row.name == "levels" else row
            for row in update.reports]  # fmt: skip
    return (*micro.reports, *about("update", rows))


def merged(
    compiler: Compiler, first: Program, second: Program, handed: Sequence[str] = (), *, execution: Execution
) -> tuple[Placed, list[PassReport]]:
    """Merge two programs into one, and make each rank's program of it. ``execution``: how the merged program runs."""
    start = time.perf_counter()
    with gc_paused():
        program = merge_programs(first, second, handed)
    ms = (time.perf_counter() - start) * 1e3
    verify(program, "join")
    local, reports = compiler.localize(program, execution)
    return (program, local), [PassReport("join", ms), *about("join", reports)]


def about(program: str, reports: Sequence[PassReport]) -> list[PassReport]:
    """Name the program in the reports of its passes."""
    return [replace(report, name=f"{program} {report.name}") for report in reports]
