"""Find the plans of a model's programs: one rank searches, and the other ranks take its plan.

A plan that was searched before is taken if it is of the traced program. A search compares its plan with presets, which
are placed greedily.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from autopar.costs.machine import Machine
from autopar.errors import MemoryLimitError, PlanError, VerifyError
from autopar.ir.commit import Staged, Value
from autopar.ir.hosts import Hosts
from autopar.ir.nodes import name_of, operands, record_of, tensor_type
from autopar.ir.program import Program, program_digest
from autopar.ir.record import TensorType
from autopar.ir.text.printer import print_type
from autopar.passes import Expand, Fold, Follow, Levels, Lift, Narrow, Pass, Place, Reshard, Share
from autopar.plan.boundary import OPEN, Boundary, UserConstraints, filled
from autopar.report.memory import memory_of
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.processes.agreement import Agreement
from autopar.search.certificate import bytes_text
from autopar.search.problem.ending import Ending
from autopar.search.search import search
from autopar.search.solutions.applied import applied, difference, layouts_of_placeholders, layouts_of_states
from autopar.search.solutions.artifact import from_json
from autopar.search.solutions.at_other_sizes import at_other_sizes
from autopar.search.solutions.found import Found
from autopar.search.solutions.solution import Solution, solution_from
from autopar.search.solutions.value_names import value_names
from autopar.search.solutions.written import write
from autopar.search.starts.copied import Copied
from autopar.search.starts.started import Starts
from autopar.search.transfer_prices.chains import Tables
from autopar.verify.levels import verify

LIKE_THE_FIRST = "the layouts are those of the first capture, of other sizes; nothing was searched"

CLOSE = 0.5  # of the limit: up to here the search does not count so much too little


@dataclass(frozen=True)
class Planner:
    """How the plans of a model are searched.

    Attributes:
        machine: the machine whose seconds decide.
        time_limit: seconds, after which the best plan so far is taken.
        memory: the most bytes that a rank may use; by default the capacity of the machine, if it is known.
        reserve: how many of these bytes to leave free, for what the search does not count.
        searches_left: how often a plan may be searched again that needs more than the search has counted.
        agreement: the ranks that take one plan; ``None`` for one process.
        given: a plan that needs no search, for the traced program that it is of; parameters have its layouts in all
            programs.
        notes: decisions that were made for the user before.
        below: only plans that cost less nanoseconds are wanted.
        tables: prices of transfers that several searches share.
        hosts: those of the job, to which ``machine`` was fitted.
        first: the plan of an earlier call that differs in sizes alone: its layouts are taken, and nothing is searched.
    """

    machine: Machine
    time_limit: float = 60.0
    agreement: Agreement | None = None
    given: Solution | None = None
    notes: list[str] = field(default_factory=list, compare=False)
    memory: float | None = None
    reserve: float = 0.0
    searches_left: int = 3
    below: float = math.inf
    tables: Tables | None = field(default=None, compare=False, repr=False)
    hosts: Hosts | None = None
    first: Solution | None = field(default=None, repr=False)


@dataclass
class PlanSearch:
    """One search of a planner. The pass ``search`` calls it.

    Attributes:
        ending: what ends the step, if the program is a micro-batch.
        starts: plans that the result is never dearer than.
        returned: ``module()`` → the names of the nodes whose values it returns, for questions to the solution.
        solution: what was found, without the times of modules; ``None`` before.
        notes: decisions that were made for the user.
    """

    planner: Planner
    ending: Ending | None = None
    starts: Starts = ()
    returned: Mapping[str, Sequence[str]] = field(default_factory=dict)
    solution: Solution | None = field(default=None, init=False)
    notes: list[str] = field(default_factory=list, init=False)

    def __call__(self, boundary: Boundary, machine: Machine, *, strict: bool, time_limit: float) -> Found:
        # the problem can be solved again later, and passes change the program until then
        traced = replace(boundary, program=boundary.program.copy())
        found = self._found(traced, machine, strict, time_limit)
        return found.of_copy(dict(zip(traced.program.nodes, boundary.program.nodes, strict=True)))

    def _found(self, boundary: Boundary, machine: Machine, strict: bool, time_limit: float) -> Found:
        self.notes += self.planner.notes
        given = self.planner.given
        if given is not None:
            found = taken(given, boundary)
            if found is not None:
                self.solution = on_machine(given, machine)
                return found
            traced, boundary = boundary.program, _with_homes(boundary, given)
            self.notes.append(_about_other(given, traced))
        if self.planner.first is not None and self.planner.below == math.inf:
            known = at_other_sizes(
                self.planner.first, boundary, machine, strict=strict, ending=self.ending, memory=self.planner.memory,
                reserve=self.planner.reserve,
            )  # fmt: skip
            if known is not None:
                self.notes.append(LIKE_THE_FIRST)
                self.solution = self._solution(known, boundary)
                return known
        agreement = self.planner.agreement
        if agreement is None:
            found = self._searched(boundary, machine, strict, time_limit)
            self.solution = self._solution(found, boundary)
            return found
        self.solution = self._of_first_rank(agreement, boundary, machine, strict, time_limit)
        return found_of(self.solution, boundary.program)

    def _of_first_rank(
        self, agreement: Agreement, boundary: Boundary, machine: Machine, strict: bool, time_limit: float
    ) -> Solution:
        """Search on the first rank, and send the plan to the others as text. All ranks call it."""
        solution: Solution | None = None

        def plan() -> Any:
            nonlocal solution
            solution = self._solution(self._searched(boundary, machine, strict, time_limit), boundary)
            return solution.to_json()

        content = agreement.of_first(plan)
        if solution is None:
            solution = from_json(content)
        if solution.graph != program_digest(boundary.program):
            raise PlanError(
                "rank 0 has searched a plan for another program than this rank's; let all ranks pass the same model "
                'and the same arguments, and have the same first values if first_values="keep" keeps them'
            )
        return solution

    def _searched(self, boundary: Boundary, machine: Machine, strict: bool, time_limit: float) -> Found:
        found = search(
            boundary, machine, strict=strict, time_limit=time_limit, memory=self.planner.memory,
            reserve=self.planner.reserve, ending=self.ending, starts=self.starts, greedy=GreedyPasses(),
            below=self.planner.below, tables=self.planner.tables,
        )  # fmt: skip
        if found.start:
            self.notes.append(f"the plan is the preset {found.start}: the search has found none that is cheaper")
        return found

    def _solution(self, found: Found, boundary: Boundary) -> Solution:
        if found.again is not None:
            found = replace(found, again=replace(found.again, returned=self.returned))
        return solution_from(found, boundary.program, boundary.mesh, "call" if self.ending is None else "step")


def may_exceed(found: Solution, planner: Planner) -> bool:
    """Return whether the explicit program of a searched plan may need more than the limit."""
    return (
        found is not planner.given
        and found.memory is not None
        and found.bytes is not None
        and found.bytes > CLOSE * found.memory
    )


def with_reserve(found: Solution, planner: Planner, peak: int) -> Planner | None:
    """Return how to search again, where the explicit program of a plan needs more than the limit; else ``None``.

    All ranks come to the same result.

    Args:
        peak: bytes of the first rank.

    Raises:
        MemoryLimitError: it was searched again often enough.
    """
    assert found.memory is not None and found.bytes is not None
    if peak <= found.memory:
        return None
    if planner.searches_left <= 0:
        raise MemoryLimitError(
            f"the plan takes {bytes_text(peak)} of a rank, {bytes_text(peak - found.memory)} more than memory="
            f"{found.memory:g} allows, although the search estimates {bytes_text(found.bytes)}; the runtime's buffers "
            f"take the rest\n  give a smaller memory=, which the search keeps, on ranks that have this much"
        )
    missed = max(peak - found.bytes, planner.reserve + peak - found.memory)
    return replace(planner, reserve=missed, searches_left=planner.searches_left - 1)


def _about_other(given: Solution, program: Program) -> str:
    """Say why a plan is not taken as a whole."""
    if given.graph == program_digest(program):
        return "constraints want other layouts than the plan: parameters have its layouts, and the others are searched"
    is_call = any(record_of(node).role == "tangent" for node in program.placeholders)
    if is_call and given.kind == "step":
        return (
            "the plan is of a training step, and this is a call of the model: parameters have its layouts, and the "
            "others are searched; parallel.train_step takes the whole plan"
        )
    return (
        f"the plan is of another call ({difference(given, program)}): parameters have its layouts, and the others are "
        f"searched"
    )


def _with_homes(boundary: Boundary, given: Solution) -> Boundary:
    """Constrain parameters to the layouts of a plan of another program.

    Raises:
        PlanError: the plan has other parameters; the error says which.
    """
    program = boundary.program
    parameters = {name_of(node): node for node in program.placeholders if record_of(node).role == "param"}
    homes = layouts_of_placeholders(given, program)
    if different := [name for name in parameters if name not in homes]:
        node = parameters[different[0]]
        raise PlanError(
            f"the plan is of another model: it has no layout for {len(different)} of {len(parameters)} parameters, "
            f"such as {different[0]} : {print_type(tensor_type(node))}; search a plan for this model"
        )
    kept = {node.name: name for name, node in parameters.items() if boundary.decided(node) is None}
    names = boundary.constraints.names if isinstance(boundary.constraints, UserConstraints) else {}
    attrs = {**boundary.constraints, **{node: homes[name] for node, name in kept.items()}}
    return replace(boundary, constraints=UserConstraints(attrs, {**names, **kept}))


# -- plans that were searched before -----------------------------------------------------------------------------------


OTHER_PRICE = "the plan's price here is not that of its file, so nothing is proven"


def taken(given: Solution, boundary: Boundary) -> Found | None:
    """Return the layouts of a plan for its program; ``None`` if it is of another, or constraints want others.

    Raises:
        PlanError: layouts in the file cannot be read, or do not fit each other; the error names the file and the value.
    """
    if given.graph != program_digest(boundary.program):
        return None
    found = found_of(given, boundary.program)
    if given.source:
        _check_fit(given, found, boundary.program)
    return found if _keeps_constraints(found, boundary) else None


def found_of(solution: Solution, program: Program) -> Found:
    """Return the layouts of a plan for the values of its program. ``PlanError`` as for ``applied``."""
    try:
        types, uses, inside = applied(solution, program)
        states = layouts_of_states(solution, program)
    except PlanError as error:
        raise PlanError(f"{solution.source}: {error}" if solution.source else str(error)) from None
    return Found(
        solution.machine, solution.nanoseconds, solution.least, solution.search_seconds, solution.reason, types, uses,
        memory=solution.memory, bytes=solution.bytes, start=solution.start, constrained=solution.constrained,
        optimizer_states=states, inside=inside,
    )  # fmt: skip


def on_machine(given: Solution, machine: Machine) -> Solution:
    """Return a plan for another machine than that of its search: nothing is proven there, and memory has no limit.

    The price is that of the search until ``repriced`` has seen the explicit programs.
    """
    if _figures(given.machine) == _figures(machine):
        return given
    same = given.machine.name == machine.name
    reason = f"the plan was searched for {'other figures of ' * same}{given.machine.name}, so nothing is proven"
    return replace(given, machine=machine, least=0.0, reason=reason, memory=None, bytes=None)


def repriced(solution: Solution, nanoseconds: int) -> Solution:
    """Return a plan that was not searched here with the price of its explicit programs.

    Where it is not the price that was saved, the bound does not hold.
    """
    if nanoseconds == solution.nanoseconds:
        return solution
    reason = solution.reason if solution.least == 0 else OTHER_PRICE
    return replace(solution, nanoseconds=nanoseconds, least=0.0, reason=reason)


def as_explicit(solution: Solution, nanoseconds: int) -> Solution:
    """Return a searched plan with the price of its explicit program.

    The search may count a transfer once that the program has twice, where many uses of a value share in several ways.
    """
    return replace(solution, nanoseconds=nanoseconds, least=min(solution.least, nanoseconds))


def _figures(machine: Machine) -> Machine:
    return replace(machine, source="", note="", aliases=(), peak=tuple(sorted(machine.peak)))


def _keeps_constraints(found: Found, boundary: Boundary) -> bool:
    """Return whether all values have the layouts that the user wants, or that the traced program says."""
    return all(_keeps(found, boundary, node) for node in boundary.program.nodes)


def _keeps(found: Found, boundary: Boundary, node: fx.Node) -> bool:
    decided, type = boundary.decided(node), found.types.get(node)
    if decided is None or not isinstance(type, TensorType) or node in boundary.tangents or node in boundary.open_sums:
        return True
    if node.op == "call_function":
        needs = [
            need.placed.attr
            for user in node.users
            if user.op != "output"
            for operand, need in zip(operands(user), found.uses[user], strict=True)
            if operand is node and need is not None
        ]
        return all(filled(decided, attr).normalize(type.shape, boundary.mesh) == attr for attr in needs)
    if OPEN not in decided.dims:
        return boundary.home(node).kept == type.attr
    wanted = filled(decided, type.attr).normalize(type.shape, boundary.mesh)
    return boundary.nearest_home(node, wanted) == type.attr


def _check_fit(given: Solution, found: Found, program: Program) -> None:
    """Raise ``PlanError`` if an op cannot have the layouts that the file of a plan gives it."""
    copy, names = program.copy(), value_names(program)
    copies = dict(zip(program.nodes, copy.nodes, strict=True))
    named = {new.name: names.get(node, node.name) for node, new in copies.items()}
    placed = found.of_copy(copies)
    with copy.edit() as edit:
        write(edit, copy, placed.types, placed.uses, placed.inside)
    copy.level = "placed"
    try:
        verify(copy)
    except VerifyError as error:
        head, _, why = str(error).partition("\n")
        value = head.rpartition(" ")[2]
        raise PlanError(
            f"{given.source}: the layouts of {named.get(value, value)} do not fit each other, so the file was changed; "
            f"search the plan again\n{why}"
        ) from None


# -- presets -----------------------------------------------------------------------------------------------------------


class GreedyPasses:
    """Runs the passes on a preset, without ``defer``, which changes the ops of a program."""

    def placed(self, boundary: Boundary, machine: Machine, *, strict: bool) -> Copied:
        copy = boundary.program.copy()
        nodes = dict(zip(boundary.program.nodes, copy.nodes, strict=True))
        own = {theirs: node for node, theirs in nodes.items()}
        how = boundary.mesh, boundary.constraints, strict, boundary.whole, machine
        made = {own[node]: [_node(step) for step in steps] for node, steps in Expand(*how).expanded(copy).items()}
        return Copied(_run(copy, Place(*how), Follow(machine), Narrow(), Lift()), nodes, made)

    def explicit(self, placed: Program, machine: Machine) -> Program:
        return _run(placed.copy(), Reshard(machine=machine), Fold(machine=machine), Share(), Levels(machine))

    def peak(self, placed: Program, machine: Machine) -> int:
        return memory_of(LocalPrograms(self.explicit(placed, machine), lambda local: None)[0]).peak


def _node(value: Value) -> fx.Node:
    node = value.node if isinstance(value, Staged) else value
    assert node is not None
    return node


def _run(program: Program, *passes: Pass) -> Program:
    for step in passes:
        step.run(program)
        program.level = step.gives
    return program
