"""Place: every value and every use gets a Layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import fx

from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.passes.manager import Pass
from autopar.plan.propagation import Completion, Wanted, where
from autopar.rules.binding import Bound, bind_node
from autopar.rules.registry import rule_of
from autopar.transitions import cost


@dataclass(frozen=True)
class Place(Pass):
    """Complete the user's constraints, in graph order.

        x : f32[32/dp 64] = input                              x : f32[32/dp 64] = input
        up : f32[256/tp 64] = param                    →       up : f32[256/tp 64] = param
        t : f32[64 256] = t(up)                                t : f32[64 256/tp] = t(up)
        mm : f32[32 256] = mm(x, t)                            mm : f32[32/dp 256/tp] = mm(x, t)

    Each op takes one of the splits that its operands already have. Over an axis that splits the inputs, data stays where
    it is and parameters come to it; over the other axes parameters stay and data comes to them; then the fewest bytes
    decide. A pending sum waits through views and through additions whose operands are all pending, and is reduced
    before any other use: to a split, where one of its users needs it split. A tangent lies as its value does, a gradient
    leaves in its parameter's Layout and is made there over the axes on which parameters stay, and returned values are
    reduced. Values without operands are replicated.

    Attributes:
        mesh: the mesh; the program's own when it has one.
        constraints: node → DistAttr; a Layout that a node of the traced program already has is one too. Other
            placeholders are replicated. What an op makes lies so for all who read it; dims with ``?`` lie as they will.
        strict: refuse ops without a rule; else one is looked for by running them, and where none is found they run on whole
            operands on every rank. The report says so.
        whole: returned values are gathered.
    """

    name: ClassVar[str] = "place"
    takes: ClassVar[str] = "traced"
    gives: ClassVar[str] = "placed"

    mesh: Mesh | None = None
    constraints: Mapping[str, DistAttr] = field(default_factory=dict)
    strict: bool = False
    whole: bool = False

    def run(self, program: Program) -> list[str]:
        mesh = self.mesh or program.mesh
        if mesh is None:
            raise ValueError("place needs a mesh: Place(mesh=Mesh(dp=2))")
        program.mesh = mesh
        completion = Completion(program, Wanted(mesh, self.constraints, self.strict, self.whole))
        completion.run()
        with program.edit() as edit:
            for node, type in completion.types.items():
                edit.annotate(node, type=type, uses=completion.uses.get(node, ()))
        return notes(program)


def notes(program: Program) -> list[str]:
    """For each op without a rule: the one that was found for it, or that every rank computes all of it; in the user's lines."""
    found: dict[tuple[str, str], list[fx.Node]] = {}
    whole: dict[tuple[str, str, str], list[fx.Node]] = {}
    for node in program.nodes:
        if node.op == "call_function" and not is_getitem(node) and rule_of(node.target).pattern is None:
            bound = bind_node(node)
            if bound.rule.pattern is None:
                whole.setdefault((bound.rule.op, bound.why, where(record_of(node))), []).append(node)
            else:
                found.setdefault((_registered(node, bound), where(record_of(node))), []).append(node)
    told = []
    for (line, place), nodes in found.items():
        told.append(
            f"{rule_of(nodes[0].target).op} has no sharding rule: one was found by running it on pieces ({len(nodes)} times); "
            f"register it to be sure, and to hear no more of it\n    {line}{place}"
        )
    for (op, why, place), nodes in whole.items():
        gathered, made = (sum(map(one, nodes)) for one in (_gathered, _made))
        told.append(
            f"{op} has no sharding rule, and none was found: {why}; each rank computes all of it, on whole operands ({len(nodes)} times, "
            f"{gathered:,} bytes gathered, {made:,} bytes of results); register_rule one, or refuse it with strict=True{place}"
        )
    return told


def _registered(node: fx.Node, bound: Bound) -> str:
    """The line that registers the rule that was found."""
    linear = f', linear="{bound.rule.linear}"' if bound.rule.linear else ""
    return f'autopar.register_rule("{bound.pattern}", "{node.target.name()}"{linear})'  # type: ignore[union-attr]


def _gathered(node: fx.Node) -> int:
    """What the worst rank receives so that an op's operands lie as it asks, in bytes."""
    pairs = [(record_of(value).type, use) for value, use in zip(operands(node), record_of(node).uses, strict=True)]
    return sum(cost(type, replace(type, layout=use.layout)) for type, use in pairs if isinstance(type, TensorType) and use is not None)


def _made(node: fx.Node) -> int:
    """All that an op makes, in bytes."""
    type = record_of(node).type
    types = type if isinstance(type, tuple) else (type,)
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in types if one is not None)
