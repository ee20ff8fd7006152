"""Split the backward of a pipeline's stage: what one gradient of a weight alone needs is computed apart, and later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from autopar.ir.nodes import is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.passes.manager import Pass
from autopar.torch_private import aten

ADD = aten.add.Tensor
APART = "weight_gradients"


@dataclass(frozen=True)
class SplitBackward(Pass):
    """Give the ops of the backward that lead to one parameter's gradient alone a phase of their own.

        backward:                                              backward:
          t : f32[8 64] = t(d_y)                                 mm : f32[64 4] = mm(d_y, w)
          mm_1 : f32[8 4] = mm(t, x)                     →       grad x = mm
          w_grad_sum : f32[8 4] = add.Tensor(w_grad, mm_1)     weight_gradients:
          mm : f32[64 4] = mm(d_y, w)                            t : f32[8 64] = t(d_y)
          grad x = mm                                            mm_1 : f32[8 4] = mm(t, x)
                                                                 w_grad_sum : f32[8 4] = add.Tensor(w_grad, mm_1)

    These are the W of a zero-bubble schedule (Qi et al., 2023): no gradient that another stage receives needs them. An
    op that leads to the gradients of several parameters stays: on the first stage, which sends no gradient, everything
    else would be W, and B empty. So does an addition to a sum whose addend stays: the addend would be kept for it.
    Linear in the graph.
    """

    name: ClassVar[str] = "split_backward"
    takes: ClassVar[str] = "explicit"
    gives: ClassVar[str] = "explicit"

    def run(self, program: Program) -> None:
        apart = weight_gradients(program)
        with program.edit() as edit:
            for node in apart:
                edit.annotate(node, phase=APART)


def weight_gradients(program: Program) -> list[fx.Node]:
    """Return the ops of the backward that lead to at most one state, a sum of gradients, and to no other result."""
    rows = list(zip(operands(program.output), record_of(program.output).results, strict=True))
    states = {value for value, result in rows if result.kind == "state"}
    leads: dict[fx.Node, fx.Node | None] = {value: value if value in states else None for value, _ in rows}
    apart: set[fx.Node] = set()
    for node in reversed(program.graph.nodes):
        if node.op != "call_function" or record_of(node).phase != "backward":
            continue
        targets = {leads[user] for user in node.users if user.op != "output"}
        targets |= {leads[node]} if node in leads else set()
        leads[node] = targets.pop() if len(targets) == 1 else None
        if leads[node] is not None:
            apart.add(node)
    for node in program.nodes:  # what only hands on a value that stays, stays
        if node in apart and not any(value in apart for value in operands(node)) and _hands_on(node):
            apart.discard(node)
    return [node for node in program.nodes if node in apart]


def _hands_on(node: fx.Node) -> bool:
    """Return whether an op is an element of a result, or adds a value to a sum."""
    return is_getitem(node) or (node.target is ADD and operands(node)[0].op == "placeholder")
