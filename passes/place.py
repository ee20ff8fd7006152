"""Place a program: give every value and every use a Layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.program import Program
from autopar.passes.manager import LayoutPass
from autopar.plan.ops_without_rule import notes_without_rule


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
        return notes_without_rule(program)
