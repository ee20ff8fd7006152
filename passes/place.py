"""Place a program: give every value and every use a Layout."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from autopar.ir.nodes import called_op, is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.passes.manager import LayoutPass
from autopar.plan.usable_rules import where
from autopar.rules.binding import bind_node
from autopar.rules.registry import rule_of
from autopar.rules.strategies import Bound
from autopar.transitions import cost


@dataclass(frozen=True)
class Place(LayoutPass):
    """Propagate the user's constraints to all values, in graph order.

        x : f32[32/dp 64] = input                              x : f32[32/dp 64] = input
        up : f32[256/tp 64] = param                    →       up : f32[256/tp 64] = param
        t : f32[64 256] = t(up)                                t : f32[64 256/tp] = t(up)
        mm : f32[32 256] = mm(x, t)                            mm : f32[32/dp 256/tp] = mm(x, t)

    Each op takes one of the splits that its operands already have. Over an axis that splits the inputs, data stays in
    place and parameters are moved; over the other axes parameters stay and data is moved; then the fewest bytes decide.
    A pending sum passes through views and through additions whose operands are all pending, and is reduced before any
    other use: to a split, if one of its users needs it split. A tangent has the Layout of its value. A gradient is
    returned in its parameter's Layout, and computed in it over the axes on which parameters stay. Returned values are
    reduced. Values without operands are replicated.

    The attributes are those of ``LayoutPass``.
    """

    name: ClassVar[str] = "place"
    takes: ClassVar[str] = "traced"
    gives: ClassVar[str] = "placed"

    def run(self, program: Program) -> list[str]:
        propagation = self._propagation(program, self._put_on_mesh(program))
        with program.edit() as edit:
            for node, type in propagation.types.items():
                edit.annotate(node, type=type, uses=propagation.uses.get(node, ()))
        return notes(program)


def notes(program: Program) -> list[str]:
    """Note for each op without a rule, with the user's line, the rule that was discovered.

    If none was, the note says that every rank computes all of it.
    """
    discovered: dict[tuple[str, str], list[fx.Node]] = {}
    whole: dict[tuple[str, str, str], list[fx.Node]] = {}
    for node in program.nodes:
        if node.op == "call_function" and not is_getitem(node) and rule_of(node.target).pattern is None:
            bound = bind_node(node)
            if bound.rule.pattern is None:
                whole.setdefault((bound.rule.op, bound.why, where(record_of(node))), []).append(node)
            else:
                discovered.setdefault((_registered(node, bound), where(record_of(node))), []).append(node)
    texts = []
    for (line, place), nodes in discovered.items():
        texts.append(
            f"{rule_of(nodes[0].target).op} has no sharding rule: one was found by running it on pieces ({len(nodes)} "
            f"times); register it to be certain, and to silence this note\n    {line}{place}"
        )
    for (op, why, place), nodes in whole.items():
        gathered, computed = (sum(map(bytes_of, nodes)) for bytes_of in (_gathered, _made))
        texts.append(
            f"{op} has no sharding rule, and none was found: {why}; each rank computes all of it, on whole operands "
            f"({len(nodes)} times, {gathered:,} bytes gathered, {computed:,} bytes of results); register_rule one, or "
            f"refuse it with strict=True{place}"
        )
    return texts


def _registered(node: fx.Node, bound: Bound) -> str:
    """Return the line that registers the discovered rule."""
    linear = f', linear="{bound.rule.linear}"' if bound.rule.linear else ""
    return f'autopar.register_rule("{bound.pattern}", "{called_op(node).name()}"{linear})'


def _gathered(node: fx.Node) -> int:
    """Return the bytes that the worst rank receives so that an op's operands have the required layouts."""
    pairs = [(record_of(value).type, use) for value, use in zip(operands(node), record_of(node).uses, strict=True)]
    return sum(
        cost(type, replace(type, layout=use.layout))
        for type, use in pairs
        if isinstance(type, TensorType) and use is not None
    )


def _made(node: fx.Node) -> int:
    """Return the bytes of all results of an op."""
    type = record_of(node).type
    types = type if isinstance(type, tuple) else (type,)
    return sum(math.prod(result.shape) * result.dtype.itemsize for result in types if result is not None)
