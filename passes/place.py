"""Place: every value and every use gets a Layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from autopar.completion import Completion, Wanted, where
from autopar.layout import DistAttr
from autopar.mesh import Mesh
from autopar.passes.manager import Pass
from autopar.program import Program, is_getitem, record_of
from autopar.rules.registry import rule_of


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
        strict: refuse ops without a rule; else they run on whole operands on every rank, and the report says so.
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
        return whole_notes(program)


def whole_notes(program: Program) -> list[str]:
    """For each op without a rule, in the user's lines: that every rank computes all of it."""
    found: dict[tuple[str, str], list[fx.Node]] = {}
    for node in program.nodes:
        if node.op == "call_function" and not is_getitem(node) and rule_of(node.target).pattern is None:
            found.setdefault((rule_of(node.target).op, where(record_of(node))), []).append(node)
    return [
        f"{op} has no sharding rule: each rank computes all of it, on whole operands ({len(nodes)} times); "
        f"register_rule one, or refuse it with strict=True{place}"
        for (op, place), nodes in found.items()
    ]
