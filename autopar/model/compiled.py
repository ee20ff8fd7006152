"""Capture a call of the model, place it on the mesh, and make the functions that run it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Protocol, TypeVar

import torch

from autopar.cache.cache import Cache
from autopar.cache.codec import Check, Codec
from autopar.capture import Captured
from autopar.capture.guards.places import GuardedPlace
from autopar.capture.specialize import specialize
from autopar.costs.durations import Durations, durations_by
from autopar.costs.machine import Machine, machine_of
from autopar.costs.prices import crosses_hosts
from autopar.costs.profile import Profile
from autopar.costs.program_price import price
from autopar.gc_pause import gc_paused
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import name_of, record_of, tensor_type
from autopar.ir.ops.seeded_random import Random
from autopar.ir.program import Program
from autopar.ir.value_names import sums_in
from autopar.model.captures import SizedCaptures
from autopar.model.inputs import CallInputs
from autopar.model.many_sizes import Explicit, explicit_at_sizes, placed_key
from autopar.model.planner import Planner, PlanSearch, as_explicit, may_exceed, repriced, with_reserve
from autopar.model.rank_context import RankContext
from autopar.passes import Search as SearchPass
from autopar.passes import pipeline, run_passes
from autopar.plan.boundary import UserConstraints
from autopar.plan.constraints import Decisions, constraints
from autopar.plan.plan import Plan, searches
from autopar.report.memory import memory_of
from autopar.report.passes import PRICE, PassReport, Reports
from autopar.report.progress import doing
from autopar.report.transfers import bytes_per_axis
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.process_step import ProcessStep
from autopar.runtime.processes.agreement import Agreement
from autopar.runtime.simulated_step import SimulatedStep
from autopar.scheduling.programs.order import OF_CALLS, ORDERS, Execution, Order, order_of_part
from autopar.scheduling.programs.overlap import Overlap, check_priorities
from autopar.search.problem.ending import Ending
from autopar.search.solutions.crossed import about_crossed
from autopar.search.solutions.solution import Solution, priced, timed
from autopar.search.starts.starting_points import starting_points
from autopar.search.symbols.expression import marks_of
from autopar.verify.levels import verify


class Reported(Protocol):
    """A dataclass with what each pass did to make it."""

    @property
    def reports(self) -> tuple[PassReport, ...]: ...


K = TypeVar("K", bound=Reported)


RUNS = (
    "this program is what runs: the local programs, and the functions that run, were made from it and would not "
    "follow an edit; change the model or the plan instead, or edit a copy of it, program.copy()"
)


@dataclass(eq=False)
class Compiled:
    """One captured call, from the capture to the functions that run it.

    Attributes:
        captured: the call as it was captured.
        program: the program with its transfers.
        local: the program of each rank.
        reports: what each pass did.
        part: returns the same call with a backward for only some of the returned values, which are given by position.
        context: this process as a rank; ``None`` where it only simulates.
        found: the plan, if it was searched.
        symbolic: the explicit program with symbols that ``program`` was made of; ``None`` if it was placed itself.
        traced: the program before it was placed, of which ``part`` is made; ``None`` if it comes from the cache.
    """

    captured: Captured
    program: Program
    local: LocalPrograms
    reports: Reports
    part: Callable[[frozenset[int]], Compiled]
    context: RankContext | None
    found: Solution | None = None
    symbolic: Program | None = None
    traced: Program | None = None

    @cached_property
    def solution(self) -> Solution | None:
        """The plan with the times of modules, if it was searched."""
        if self.found is None:
            return None
        return priced(timed(self.found, [(self.program, 1)]), [(1, self.program)], self.captured.at_sizes)

    def reports_now(self) -> Reports:
        """The reports, with the crossovers that are known by now and that the sizes of the call are beyond."""
        at_sizes = self.captured.at_sizes
        if self.found is None or not self.found.solved or at_sizes is None:
            return self.reports
        marks = marks_of(at_sizes.shapes, at_sizes.integers)
        sizes: dict[str, int] = {}
        for name, row in marks.items():
            for mark, size in zip(row, at_sizes.shapes[name], strict=True):
                if mark is not None:
                    sizes.setdefault(mark, size)
        notes = about_crossed(self.found.solved, sizes)
        return Reports([*self.reports, PassReport("crossovers", 0.0, notes=tuple(notes))]) if notes else self.reports

    @property
    def text(self) -> str:
        """The program and the order in which it runs; ranks compare it, on stages of other ranks, too."""
        head, _, lines = str(self.program).partition("\n")
        return f"{head.partition(' ranks ')[0]}\n{lines}\n{self.local.order.text if self.local.order else ''}"

    @property
    def homes(self) -> dict[str, DistAttr]:
        """The layouts of the parameters, by the user's names."""
        return {
            name_of(node): tensor_type(node).attr
            for node in self.program.placeholders
            if record_of(node).role == "param"
        }

    @cached_property
    def simulated(self) -> SimulatedStep:
        return SimulatedStep(self.program, self.local, lambda positions: self.part(positions).simulated)

    @cached_property
    def here(self) -> ProcessStep:
        context = self.context
        assert context is not None
        return ProcessStep(self.program, self.local[context.rank], lambda positions: self.part(positions).here,
                           groups=context.groups_for(self.local), agreement=context.agreement,
                           device=None if context.job is None else context.job.device,
                           regions=context.regions)  # fmt: skip


ONE_RANK = "the mesh has one rank, so there is nothing to search, and solution is None"


@dataclass(frozen=True)
class Compiler:
    """How the calls of a model are captured and placed.

    Attributes:
        context: this process as a rank, for which alone a local program is made; ``None`` if this process only
            simulates.
        strict: whether ops without a sharding rule are refused.
        whole: whether returned values are gathered.
        random: the option of ``parallelize``.
        homes: parameter → its layout between calls, which overrides the plan.
        numbers: the places whose floats become inputs of the program.
        machine: the machine whose nanoseconds decide where the plan is not searched; without one, bytes decide.
        overlap: what decides the order of communication.
        figures: a machine or measured durations, whose seconds decide that order; by default those of the machine.
        planner: how the plan is searched, if it is.
        sizes: the captures that serve many sizes.
        cache: what other processes have captured; ``None``: each process captures by itself.
        check: is called with each capture before it is placed.
    """

    model: torch.nn.Module
    mesh: Mesh
    plan: Plan | None
    context: RankContext | None
    strict: bool = False
    whole: bool = False
    random: Random = "parallel"
    homes: Mapping[str, DistAttr] = field(default_factory=dict)
    numbers: tuple[GuardedPlace, ...] = ()
    machine: Machine | None = None
    overlap: Overlap = field(default_factory=Overlap)
    figures: Machine | Profile | None = None
    planner: Planner = field(default_factory=lambda: Planner(machine_of("cpu")))
    sizes: SizedCaptures = field(kw_only=True)
    cache: Cache | None = field(default=None, compare=False)
    check: Check | None = field(default=None, compare=False)

    @property
    def searches(self) -> bool:
        """Whether the plan of a program is searched: on one rank there is nothing to choose."""
        return searches(self.plan) and self.mesh.size > 1

    def of(self, model: torch.nn.Module, **changes: Any) -> Compiler:
        """Return this compiler for another model, with captures with symbols of its own."""
        return replace(self, model=model, sizes=self.sizes.of(model), **changes)

    def once(self, make: Callable[[Compiler], K], codec: Callable[[], Codec[K]]) -> tuple[K, str]:
        """Return what ``make`` makes, or what other processes have kept of it. On processes all ranks call it.

        This is the one way into the cache: of calls and of micro-batches, of updates, and of calls on stages.

        Args:
            make: is given this compiler, or that of a process that plans for others.
            codec: returns how it is kept.

        Returns:
            It, with a report of the cache; and the digest of the text in which other processes have it, "" if they do
            not.
        """
        if self.cache is None:
            return make(self), ""
        made, report, digest = self.cache.through(
            lambda ranks, check: make(self.planned_by(ranks, check)), codec(), self.planner.agreement
        )
        self.sizes.share()
        reported: Any = made
        return replace(reported, reports=Reports((*made.reports, report))), digest

    def planned_by(self, ranks: Agreement | None, check: Check | None) -> Compiler:
        """Return this compiler for ranks that agree on a plan; ``None``: this process plans alone.

        With ranks, captures with symbols that only some of them have are forgotten: all make the same ones.
        """
        if ranks is not None:
            self.sizes.forget_unshared()
        return replace(self, planner=replace(self.planner, agreement=ranks), check=check)

    def like(self, first: Solution | None, numbers: tuple[GuardedPlace, ...]) -> Compiler:
        """Return this compiler for a call with these ``numbers`` that takes the layouts of an earlier plan, if any."""
        return replace(self, planner=replace(self.planner, first=first), numbers=numbers)

    def serves(self, inputs: CallInputs) -> bool:
        """Return whether a call needs no trace, because a capture with symbols serves its sizes."""
        return not self.numbers and self.sizes.serves(inputs.whole())

    @gc_paused()
    def compile(self, inputs: CallInputs, notes: Sequence[str] = ()) -> Compiled:
        """Capture a call and place it. ``notes`` are added to the report."""
        with doing("parallelize"):
            captured, attrs, report = self.capture(inputs, notes)
            placed = self._placed(captured, captured.program, attrs, [report], captured.symbolic is not None)
            if self.overlap.priorities is not None:
                check_priorities(self.overlap, [placed.program])
            return placed

    def capture(
        self, inputs: CallInputs, notes: Sequence[str] = ()
    ) -> tuple[Captured, dict[str, DistAttr], PassReport]:
        """Capture a call. Returns it with the layouts that the plan gives to its values, and the report."""
        start = time.perf_counter()
        captured, about_sizes = self.sizes.capture(inputs.whole(), self.numbers)
        captured_ms = (time.perf_counter() - start) * 1e3
        if self.check is not None:
            self.check(captured)
        attrs, decided = self.constraints_of(captured, inputs)
        alone = (ONE_RANK,) if searches(self.plan) and not self.searches else ()
        verify(captured.program, "capture")
        return (
            captured,
            attrs,
            PassReport(
                "capture",
                captured_ms,
                notes=(*notes, *about_sizes, *captured.notes, *decided.notes, *alone),
                unmatched=decided.unmatched,
            ),
        )

    def constraints_of(self, captured: Captured, inputs: CallInputs) -> tuple[UserConstraints, Decisions]:
        """Return the layouts that the plan gives to the values of a call, with what was decided for the user."""
        return constraints(self.plan, self.model, self.mesh, captured, {**self.homes, **inputs.layouts})

    def place(
        self,
        program: Program,
        attrs: Mapping[str, DistAttr],
        device: torch.device,
        *,
        execution: Execution,
        **options: Any,
    ) -> tuple[LocalPrograms, list[PassReport]]:
        """Run all passes after capture: the program gets its layouts and transfers, and each rank its local program.

        ``execution`` says how the program runs. The other arguments are those of ``through_passes``.
        """
        reports, _ = self.through_passes(program, attrs, device, **options)
        local, more = self.localize(program, execution)
        return local, [*reports, *more]

    def through_passes(
        self,
        program: Program,
        attrs: Mapping[str, DistAttr],
        device: torch.device,
        *,
        captured: Captured | None = None,
        ending: Ending | None = None,
        **options: Any,
    ) -> tuple[list[PassReport], Solution | None]:
        """Run the passes that make a traced program explicit. Returns what each did, and the plan if it was searched.

        Args:
            attrs: node → its layout, of the nodes that the plan decides.
            captured: the call that the program was made from; a searched plan is then no dearer than any preset.
            ending: what ends the step, if the program is a micro-batch.
            options: further options of ``passes.pipeline``; with ``search=True``, the planner searches the others.
        """
        search = None
        if options.pop("search", False):
            starts = () if captured is None else starting_points(self.model, captured, self.mesh)
            returned = {} if captured is None else {f"{path}()": names for path, names in captured.modules.items()}
            search = PlanSearch(self.planner, ending, starts, returned)
            options |= {"search": search, "machine": self.planner.machine, "time_limit": self.planner.time_limit}
        options.setdefault("machine", self.machine)
        if crosses_hosts(self.mesh, self.planner.machine, self.planner.hosts):
            options |= {"levels": self.planner.machine, "hosts": self.planner.hosts}
        passes = pipeline(self.mesh, attrs, strict=self.strict, whole=self.whole, device=device, **options)
        reports = run_passes(program, passes)
        if search is not None and search.notes:
            reports.append(PassReport("plan", 0.0, notes=tuple(search.notes)))
        return reports, None if search is None else search.solution

    def found(
        self, program: Program, attrs: Mapping[str, DistAttr], device: torch.device, ending: Ending, **options: Any
    ) -> dict[str, DistAttr]:
        """Return the layouts of the inputs in the cheapest plan of a traced program, which does not change.

        Memory has no limit.
        """
        search, copy = PlanSearch(replace(self.planner, memory=math.inf, below=math.inf), ending), program.copy()
        options |= {"search": search, "machine": self.planner.machine, "time_limit": self.planner.time_limit}
        run_passes(copy, pipeline(self.mesh, attrs, strict=self.strict, device=device, last=SearchPass, **options))
        return {n.name: tensor_type(n).attr for n in copy.placeholders if record_of(n).role == "input"}

    def localize(self, program: Program, execution: Execution = OF_CALLS) -> tuple[LocalPrograms, list[PassReport]]:
        """Decide the order of an explicit program, and make each rank's scheduled program of it."""
        start = time.perf_counter()
        with doing("schedule"):
            order = ORDERS.of(program, execution, self._durations(program, execution), self.overlap)
        scheduled = PassReport("schedule", (time.perf_counter() - start) * 1e3)
        start = time.perf_counter()
        with doing("localize"):
            local = LocalPrograms(program, lambda local: verify(local, "schedule"), order)
            for rank in self.mesh.ranks if self.context is None else [self.context.rank]:
                if rank in self.mesh:  # else it is a rank of another stage
                    local[rank]
        ms = (time.perf_counter() - start) * 1e3
        program.fixed = RUNS
        return local, [scheduled, PassReport("localize", ms, bytes=bytes_per_axis(program))]

    def order_of_part(self, local: LocalPrograms, part: Program, execution: Execution) -> Order:
        """Return the order of the part of a stage, of a program of all stages, with its times."""
        assert local.order is not None
        return order_of_part(local.order, part, execution, self._durations(part, execution), self.overlap)

    def _durations(self, program: Program, execution: Execution) -> Durations:
        """Return the seconds of the ops and transfers of an explicit program, as it runs.

        Stages are measured before they are joined, and so are not looked up as one program.
        """
        figures = self.figures or self.machine or self.planner.machine
        zeros = sums_in(program) if execution.from_zero else ()
        return durations_by(program, figures, zeros, strict=not program.stages)

    def _placed(
        self,
        captured: Captured,
        program: Program,
        attrs: Mapping[str, DistAttr],
        reports: list[PassReport],
        with_symbols: bool = False,
    ) -> Compiled:
        traced = program.copy() if len(captured.differentiable) > 1 or self.searches else program

        def passes(program: Program, captured: Captured) -> tuple[list[PassReport], Solution | None]:
            return self.through_passes(program, attrs, captured.device, captured=captured, search=self.searches)

        made = None
        if with_symbols:
            made = explicit_at_sizes(captured, placed_key(attrs, self.planner.memory), passes)
            reports += made.reports if made.refused else []
        if made is None or made.refused:
            made = Explicit(program, *passes(program, captured))
        program, found = made.program, made.found
        local, more = self.localize(program)
        if found is not None and may_exceed(found, self.planner):
            peak = memory_of(local[0]).peak
            if (again := with_reserve(found, self.planner, peak)) is not None:
                return replace(self, planner=again)._placed(captured, traced, attrs, reports)
        reports += [*made.reports, *more]
        if found is not None:
            nanoseconds = price(program, found.machine).nanoseconds
            given = self.planner.given is not None
            found = repriced(found, nanoseconds) if given else as_explicit(found, nanoseconds)
            reports.append(PassReport(PRICE, 0.0, notes=(found.certificate,)))

        @cache
        def part(positions: frozenset[int]) -> Compiled:
            return self.part_of(replace(captured, program=traced), attrs, program, positions)

        return Compiled(captured, program, local, Reports(reports), part, self.context, found, made.symbolic, traced)

    def part_of(
        self, captured: Captured, attrs: Mapping[str, DistAttr], explicit: Program, positions: frozenset[int]
    ) -> Compiled:
        """Return a captured call with a backward for only some of the returned values.

        Args:
            captured: with its traced program.
            attrs: node → its layout, of the nodes that the plan decides.
            explicit: the program of all values, whose parameters and inputs keep the layouts that a search gave them.
            positions: those of the values.
        """
        if self.searches:
            kept = [node for node in explicit.placeholders if record_of(node).role != "tangent"]
            attrs = {**attrs, **{node.name: tensor_type(node).attr for node in kept}}
        part = specialize(captured.program, positions, captured.device)
        verify(part, "specialize")
        return self._placed(captured, part, attrs, [])
