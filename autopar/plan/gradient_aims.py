"""Aim gradients at the layouts of their parameters, and values that gradients are made of by views, sums and casts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autopar.ir.mesh import Mesh
from autopar.ir.nodes import is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType, ValueType
from autopar.plan.boundary import ADDITIONS, gradient_sums
from autopar.plan.choice import Aim, opened
from autopar.rules.binding import bind_node
from autopar.rules.pointwise import CASTS


def gradient_aims(
    program: Program, types: Mapping[fx.Node, ValueType], axes: frozenset[str], mesh: Mesh
) -> dict[fx.Node, Aim]:
    """Return an aim for each gradient: to be computed in its parameter's layout over ``axes``.

    Parameters stay on ``axes``. Aims pass backwards through views, additions and casts.
    """
    aims: dict[fx.Node, Aim] = {}
    homes = {node.name: type for node, type in types.items() if node.op == "placeholder"}
    parameter_of = {
        sum.name: parameter.name for sum, parameter in gradient_sums(program).items() if parameter is not None
    }
    output = program.output
    for value, result in zip(operands(output), record_of(output).results, strict=True):
        home = (
            homes.get(parameter_of.get(result.of, result.of))
            if result.kind == "grad" or result.of in parameter_of
            else None
        )
        if isinstance(home, TensorType) and axes.intersection(home.attr.axes):
            aims[value] = Aim(opened(home.attr, axes), firm=True)
    for node in reversed(program.graph.nodes):
        if node not in aims or node.op != "call_function" or is_getitem(node):
            continue
        bound = bind_node(node)
        if node.target in ADDITIONS:
            same = [value for value in operands(node) if record_of(value).type == record_of(node).type]
            aims |= {value: aims[node] for value in same if value not in aims and value.op == "call_function"}
        elif node.target in CASTS:
            aims.setdefault(operands(node)[0], aims[node])
        elif bound.rule.view and len(bound.results) == len(bound.operands) == 1:
            attr = bound.before(aims[node].attr, mesh)
            if attr is not None and attr.axes:
                aims.setdefault(operands(node)[0], Aim(opened(attr, axes), firm=True))
    return aims
