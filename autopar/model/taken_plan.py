"""Take a plan that was searched before for a traced program: check that it is of it, and on which machine it counts."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopar.costs.machine import Machine
from autopar.errors import PlanError, VerifyError
from autopar.ir.digest import program_digest
from autopar.ir.nodes import operands
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.plan.boundary import OPEN, Boundary, filled
from autopar.search.solutions.applied import applied, layouts_of_states
from autopar.search.solutions.found import Found
from autopar.search.solutions.solution import Solution
from autopar.search.solutions.value_names import value_names
from autopar.search.solutions.written import write
from autopar.verify.levels import verify

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
    named = {placed.name: names.get(node, node.name) for node, placed in copies.items()}
    types = {copies[node]: type for node, type in found.types.items()}
    uses = {copies[node]: needs for node, needs in found.uses.items()}
    inside = {copies[node]: steps for node, steps in found.inside.items()}
    with copy.edit() as edit:
        write(edit, copy, types, uses, inside)
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
