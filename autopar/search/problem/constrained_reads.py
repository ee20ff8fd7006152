"""Find the states that constraints on results allow: all who read a constrained result read it in that layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from torch import fx

from autopar.errors import PlanError
from autopar.ir.layout import DistAttr, layout_of
from autopar.ir.nodes import record_of
from autopar.ir.text.printer import print_dims, print_node
from autopar.plan.boundary import Boundary, filled
from autopar.plan.ops_without_rule import where
from autopar.rules.binding import bind_node
from autopar.search.problem.problem import Problem, Reader, Value
from autopar.search.transfer_prices.classes import UNREAD


class _Wish(NamedTuple):
    """What a constraint asks of the strategies of one op.

    Attributes:
        fits: the states that meet it.
        returned: whether the op makes the constrained value, which the program returns; otherwise the op reads it.
    """

    node: fx.Node
    decided: DistAttr
    fits: np.ndarray
    returned: bool


def allowed_states(problem: Problem, boundary: Boundary) -> dict[int, np.ndarray]:
    """Return variable → whether constraints allow each of its states, for all ops that read a constrained result.

    A state or a gradient is returned in the home of its placeholder, whatever the constraint is.

    Raises:
        PlanError: no strategy of an op meets its constraints.
    """
    wishes: dict[int, list[_Wish]] = {}
    for node in problem.program.nodes:
        if node.op != "call_function" or isinstance(record_of(node).type, tuple):
            continue
        if (decided := boundary.decided(node)) is None:
            continue
        value = problem.value(node)
        for reader in value.readers:
            if reader.variable in problem.homes:
                continue
            returned = reader.variable == value.variable
            fits = _returns(boundary, decided, value, reader) if returned else _reads(boundary, decided, value, reader)
            wishes.setdefault(reader.variable, []).append(_Wish(node, decided, fits, returned))
    allowed = {}
    for variable, asked in wishes.items():
        allowed[variable] = np.logical_and.reduce([wish.fits for wish in asked])
        if not allowed[variable].any():
            op = next(node for node, number in problem.variables.items() if number == variable)
            raise _contradiction(problem, boundary, op, _needed(asked))
    return allowed


def _reads(boundary: Boundary, decided: DistAttr, value: Value, reader: Reader) -> np.ndarray:
    shape = value.type.shape
    return np.array([
        attr == UNREAD or filled(decided, attr).normalize(shape, boundary.mesh) == attr for attr, _ in reader.states
    ])  # fmt: skip


def _returns(boundary: Boundary, decided: DistAttr, value: Value, reader: Reader) -> np.ndarray:
    """Return for each state whether the value is returned as one in the layout of the constraint is."""
    shape, mesh = value.type.shape, boundary.mesh
    read = [filled(decided, attr).normalize(shape, mesh) for attr, _ in value.states]
    wanted = [boundary.returned_attr(replace(value.type, layout=layout_of(mesh, attr))) for attr in read]
    return np.array([attr == want for (attr, _), want in zip(reader.states, wanted, strict=True)])


def _needed(asked: Sequence[_Wish]) -> list[_Wish]:
    """Leave out the wishes, one at a time, without which there is no strategy either."""
    kept = list(asked)
    for wish in asked:
        others = [other for other in kept if other is not wish]
        if others and not np.logical_and.reduce([other.fits for other in others]).any():
            kept = others
    return kept


def _contradiction(problem: Problem, boundary: Boundary, op: fx.Node, asked: Sequence[_Wish]) -> PlanError:
    program, bound = problem.program, bind_node(op)
    wanted = " and ".join(
        f"{'returns' if wish.returned else 'reads'} {wish.node.name} as "
        f"[{print_dims(problem.value(wish.node).type.shape, wish.decided)}]"
        for wish in asked
    )
    names = list(dict.fromkeys(boundary.said(wish.node) for wish in asked))
    one_of = "it" if len(names) == 1 else "one of them"
    lines = "".join(f"\n  {print_node(program, node)}" for node in dict.fromkeys((*(w.node for w in asked), op)))
    return PlanError(
        f"no strategy of {op.name} {wanted}, as the plan has {' and '.join(names)}{lines}{where(record_of(op))}\n"
        f"  the rule of {bound.rule.op} is {bound.pattern}: an axis splits one factor, and none with !; change the "
        f"plan's layout of {' or of '.join(names)}, or leave {one_of} out"
    )
