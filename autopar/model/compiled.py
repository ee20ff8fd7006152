"""A captured step on the mesh: everything from capture to what runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from autopar.capture import Captured, capture_call
from autopar.capture.guards.places import GuardedPlace
from autopar.capture.specialize import specialize
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.model.inputs import CallInputs
from autopar.passes import pipeline, run_passes
from autopar.plan.constraints import constraints
from autopar.plan.plan import Plan
from autopar.report.passes import PassReport, Reports
from autopar.report.progress import doing
from autopar.report.transfers import bytes_per_axis
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.process_step import ProcessStep
from autopar.runtime.processes.agreement import Agreement
from autopar.runtime.simulated_step import SimulatedStep
from autopar.verify.levels import verify


@dataclass(frozen=True)
class RankContext:
    """What a rank needs to run its programs in this process.

    Attributes:
        rank: on the mesh.
        groups: ranks, in ascending order → the name of their process group.
        agreement: compares the calls of the ranks; ``None`` for one rank.
    """

    rank: int
    groups: Mapping[tuple[int, ...], str]
    agreement: Agreement | None = None


RUNS = (
    "this program is what runs: the local programs, and the functions that run, were made of it and would not follow an edit; "
    "change the model or the plan instead, or edit a copy of it, program.copy()"
)


@dataclass(eq=False)
class Compiled:
    """One captured step: as it was captured, with its transfers, in the shapes of each rank, and ready to run.

    Attributes:
        part: gives the step whose backward has gradients of only some of the returned values.
        context: this process as a rank; ``None`` where it only simulates.
    """

    captured: Captured
    program: Program
    local: LocalPrograms
    reports: Reports
    part: Callable[[frozenset[int]], Compiled]
    context: RankContext | None

    @cached_property
    def simulated(self) -> SimulatedStep:
        return SimulatedStep(self.program, self.local, lambda given: self.part(given).simulated)

    @cached_property
    def here(self) -> ProcessStep:
        context = self.context
        assert context is not None
        return ProcessStep(self.program, self.local[context.rank], lambda given: self.part(given).here,
                           groups=context.groups, agreement=context.agreement)  # fmt: skip


@dataclass(frozen=True)
class Compiler:
    """How the calls of a model are captured and placed.

    Attributes:
        context: this process as a rank, of which alone a local program is made; ``None`` where this process only simulates.
        strict: refuse ops that have no sharding rule.
        whole: returned values are gathered.
        random: that of ``parallelize``.
        homes: how some parameters lie, whatever the plan says.
        numbers: places whose floats should be inputs.
    """

    model: torch.nn.Module
    mesh: Mesh
    plan: Plan | None
    context: RankContext | None
    strict: bool = False
    whole: bool = False
    random: str = "parallel"
    homes: Mapping[str, DistAttr] = field(default_factory=dict)
    numbers: tuple[GuardedPlace, ...] = ()

    def compile(self, inputs: CallInputs, notes: Sequence[str] = ()) -> Compiled:
        """Capture a call and place it. ``notes`` are added to the report."""
        with doing("parallelize"):
            captured, attrs, report = self.capture(inputs, notes)
            return self._placed(captured, captured.program, attrs, [report])

    def capture(self, inputs: CallInputs, notes: Sequence[str] = ()) -> tuple[Captured, dict[str, DistAttr], PassReport]:
        """A call as it was captured, and the layouts that the plan gives its values."""
        start = time.perf_counter()
        captured = capture_call(self.model, inputs.whole(), self.random, self.numbers)
        captured_ms = (time.perf_counter() - start) * 1e3
        attrs, decided = constraints(self.plan, self.model, self.mesh, captured, {**self.homes, **inputs.layouts})
        verify(captured.program, "capture")
        return captured, attrs, PassReport("capture", captured_ms, notes=(*notes, *captured.notes, *decided.notes), unmatched=decided.unmatched)

    def place(self, program: Program, attrs: Mapping[str, DistAttr], device: torch.device, *, widen: bool = False) -> tuple[LocalPrograms, list[PassReport]]:
        """Everything after capture: the program gets its Layouts and transfers, and each rank its own."""
        reports = run_passes(program, pipeline(self.mesh, attrs, strict=self.strict, whole=self.whole, device=device, widen=widen))
        local, report = self.localize(program)
        return local, [*reports, report]

    def localize(self, program: Program) -> tuple[LocalPrograms, PassReport]:
        """Each rank's own, of an explicit program."""
        with doing("localize"):
            return self._localized(program)

    def _localized(self, program: Program) -> tuple[LocalPrograms, PassReport]:
        start = time.perf_counter()
        local = LocalPrograms(program, lambda made: verify(made, "localize"))
        for rank in self.mesh.ranks if self.context is None else [self.context.rank]:
            local[rank]
        ms = (time.perf_counter() - start) * 1e3
        program.fixed = RUNS
        return local, PassReport("localize", ms, bytes=bytes_per_axis(program))

    def _placed(self, captured: Captured, program: Program, attrs: Mapping[str, DistAttr], reports: list[PassReport]) -> Compiled:
        traced = program.copy() if len(captured.differentiable) > 1 else program
        local, more = self.place(program, attrs, captured.device)
        reports += more
        special: dict[frozenset[int], Compiled] = {}

        def specialized(given: frozenset[int]) -> Compiled:
            if given not in special:
                part = specialize(traced, given, captured.device)
                verify(part, "specialize")
                special[given] = self._placed(captured, part, attrs, [])
            return special[given]

        return Compiled(captured, program, local, Reports(reports), specialized, self.context)
