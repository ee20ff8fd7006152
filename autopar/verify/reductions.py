"""Check that a pending value is reduced once: two sums of the same addends may differ in the last bit."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx

from autopar.ir import transfers
from autopar.ir.computed_again import computed_again, hashable
from autopar.ir.nodes import called_op, operands, record_of
from autopar.ir.record import TensorType
from autopar.ir.subaxes import overlap
from autopar.rules.binding import bind_node
from autopar.rules.pointwise import CASTS
from autopar.verify.subject import Subject

REDUCTIONS = (transfers.all_reduce, transfers.reduce_scatter)
ROUNDED = ("sum", "avg", "prod")  # reductions whose result depends on their order
PASSED = (transfers.wait, transfers.join_chunks)  # of the transfer before


class _Way(NamedTuple):
    """How a value comes from one that an op has made: through which transfers, views and casts."""

    root: fx.Node
    steps: tuple[Any, ...] = ()
    axes: tuple[str, ...] = ()  # over which it is reduced by then


def check_reduced_once(of: Subject) -> None:
    """Check that no axis of a pending value is reduced in two ways.

    What waits through a view or a cast is the same value, and so is what the backward computes again. Equal reductions
    are one: ``share`` merges them.
    """
    ways: dict[fx.Node, _Way] = {}
    reduced: dict[fx.Node, list[tuple[str, _Way, fx.Node]]] = {}  # root → the axes, how each is reduced, and where
    for node in of.program.nodes:
        if node.op != "call_function" or not node.users or not operands(node):
            continue
        values = operands(node)
        if node.target in PASSED:
            if values[0] in ways:
                ways[node] = ways[values[0]]
            continue
        if node.target not in transfers.BY_FUNCTION and not (len(values) == 1 and _waits(of, node, values[0])):
            continue
        before = ways.get(values[0]) or _Way(values[0])
        axes: tuple[str, ...] = ()
        if node.target in REDUCTIONS and _rounds(node):
            axes = tuple(transfers.axes_of(transfers.arguments(node.target, node.args, node.kwargs)["axis"]))
            if any(overlap(axis, other) for axis in axes for other in before.axes):
                before = _Way(values[0])  # a sum is added up again: that is another value
        step = node.target, hashable(node.args[1:]), hashable(dict(node.kwargs))
        way = _Way(before.root, (*before.steps, step), (*before.axes, *axes))
        if axes:
            reduced.setdefault(way.root, []).extend((axis, way, node) for axis in axes)
        if of.program.level in ("local", "scheduled") or _pending(node):
            ways[node] = way
    roots = computed_again(of.program, reduced)
    first: dict[object, list[tuple[str, _Way, fx.Node]]] = {}
    for root, found in reduced.items():
        known = first.setdefault((roots.get(root, root), record_of(root).type), [])
        for axis, way, node in found:
            for other, its, at in known:
                if overlap(axis, other) and (axis != other or way.steps != its.steps):
                    raise of.error(node, _refusal(axis, at, node, root, its.root), root, *operands(at), at)
            known.append((axis, way, node))


def _refusal(axis: str, at: fx.Node, node: fx.Node, root: fx.Node, other: fx.Node) -> str:
    again = "" if root is other else f" (it is {other.name}, computed again)"
    return (
        f"{root.name}{again} is reduced over {axis} in two ways, {at.name} and {node.name}, and two orders of adding "
        f"differ in the last bit: reduce it once, and make the other Layout of {at.name}"
    )


def _rounds(node: fx.Node) -> bool:
    type = record_of(node).type
    floats = isinstance(type, TensorType) and (type.dtype.is_floating_point or type.dtype.is_complex)
    return floats and transfers.arguments(node.target, node.args, node.kwargs).get("op", "sum") in ROUNDED


def _pending(node: fx.Node) -> bool:
    type = record_of(node).type
    return isinstance(type, TensorType) and bool(type.attr.pending)


def _waits(of: Subject, node: fx.Node, value: fx.Node) -> bool:
    """Return whether a pending value waits through a view or a cast."""
    if of.program.level != "explicit" or not (_pending(node) and _pending(value)):
        return False
    return called_op(node) in CASTS or bind_node(node).rule.view
