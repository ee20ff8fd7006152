"""Hold the layouts that a search found, with their certificate."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from torch import fx

from autopar.costs.machine import Machine
from autopar.errors import PlanError
from autopar.ir.layout import DistAttr, layout_of
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import element_of, is_getitem, operands, record_of
from autopar.ir.record import Requirement, ValueType, requirement_of
from autopar.plan.boundary import required_dtypes
from autopar.search.certificate import TOLERANCE, Certificate
from autopar.search.problem.optimizer_states import chosen_layouts
from autopar.search.problem.problem import Problem
from autopar.search.problem.strategies import StepLayouts
from autopar.search.solutions.again import Again
from autopar.search.solver.solver import Answer
from autopar.search.transfer_prices.classes import UNREAD


@dataclass(frozen=True)
class Found(Certificate):
    """The layouts that a search found.

    Attributes:
        types: node → the type of its result, with a Layout.
        uses: node → what it requires of its operands.
        again: solves the problem again; ``None`` for a plan that was not searched here.
        start: the starting point that it is, if one was cheaper than what the search found.
        optimizer_states: parameter → the layout of the optimizer's state, where the search has chosen it.
        inside: op → the layouts of its expansion, of the ops that are expanded.
    """

    types: dict[fx.Node, ValueType]
    uses: dict[fx.Node, tuple[Requirement | None, ...]]
    again: Again | None = field(default=None, repr=False, compare=False)
    start: str = ""
    optimizer_states: Mapping[str, DistAttr] = field(default_factory=dict)
    inside: Mapping[fx.Node, tuple[StepLayouts, ...]] = field(default_factory=dict)

    def of_copy(self, nodes: Mapping[fx.Node, fx.Node]) -> Found:
        """Return the layouts for a copy of the program. ``nodes``: node → its copy."""
        return replace(
            self,
            types={nodes[node]: type for node, type in self.types.items()},
            uses={nodes[node]: uses for node, uses in self.uses.items()},
            inside={nodes[node]: steps for node, steps in self.inside.items()},
        )

    def idle_axes(self, mesh: Mesh) -> list[str]:
        """Return the axes over which no value is split or pending: all their ranks do the same."""
        types = [part for type in self.types.values() for part in (type if isinstance(type, tuple) else (type,))]
        used = {axis for type in types if type is not None for axis in type.attr.axes}
        return [axis for axis in mesh.names if mesh.sizes[axis] > 1 and axis not in used]


def found_by(
    answer: Answer, problem: Problem, machine: Machine, start: float, time_limit: float, *, constrained: bool = False
) -> Found:
    """Return the layouts of an answer to a problem.

    Args:
        start: when its search began, of ``time.monotonic``.
        constrained: whether the user has given layouts to the problem.
    """
    if not all(states[answer.states[variable]] for variable, states in problem.allowed):
        raise PlanError(
            "the time limit ended the search before it had a plan that meets the constraints; allow more time"
        )
    types, uses = _layouts(problem, answer.states)
    price = problem.explicit_price(answer.states.tolist())
    seconds = time.monotonic() - start
    least = answer.bound * problem.microbatches
    exact = least > price - TOLERANCE
    late = seconds >= time_limit
    reason = "" if exact else "the time limit ended the search" if late else "too many plans are near it"
    again = Again(problem, answer.states, time_limit, constrained, settled=answer.settled)
    return Found(
        machine, price, least, seconds, reason, types, uses, again,
        optimizer_states=chosen_layouts(problem, answer.states), constrained=constrained,
        inside=problem.inside(answer.states.tolist()),
    )  # fmt: skip


def _layouts(
    problem: Problem, states: np.ndarray
) -> tuple[dict[fx.Node, ValueType], dict[fx.Node, tuple[Requirement | None, ...]]]:
    mesh = problem.mesh
    types: dict[fx.Node, ValueType] = {}
    uses: dict[fx.Node, tuple[Requirement | None, ...]] = {}
    for node in problem.program.nodes:
        record = record_of(node)
        if node.op == "output":
            types[node] = None
            uses[node] = problem.required_results(states.tolist())
        elif is_getitem(node):
            source, index = element_of(node)
            parts = types[source]
            assert isinstance(parts, tuple)
            types[node], uses[node] = parts[index], (None,)
        elif node.op == "call_function":
            variable = problem.variables[node]
            placed = problem.placed[variable][states[variable]]
            types[node] = _placed(record.type, placed.gives, mesh)
            dtypes = required_dtypes(record, [problem.value(operand).type for operand in operands(node)])
            uses[node] = tuple(
                None if a == UNREAD else requirement_of(mesh, a, d) for a, d in zip(placed.needs, dtypes, strict=True)
            )
        else:
            variable = problem.variables[node]
            types[node] = _placed(record.type, (problem.homes[variable][states[variable]],), mesh)
    return types, uses


def _placed(type: ValueType, attrs: tuple[DistAttr | None, ...], mesh: Mesh) -> ValueType:
    parts = tuple(
        None if part is None or attr is None else replace(part, layout=layout_of(mesh, attr))
        for part, attr in zip(type if isinstance(type, tuple) else (type,), attrs, strict=True)
    )
    return parts if isinstance(type, tuple) else parts[0]
