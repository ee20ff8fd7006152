"""Reassociate sums before a search: addends that may be pending come first, so that one reduction may serve all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from autopar.ir.edit import Edit, Value
from autopar.ir.layout import DistAttr
from autopar.ir.nodes import is_getitem, operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.passes.manager import Pass
from autopar.plan.ops_without_rule import usable_rule
from autopar.torch_private import aten

ADD = aten.add.Tensor


@dataclass(frozen=True)
class Reassociate(Pass):
    """Reorder a chain of additions so that addends that some strategy leaves pending come first.

        p : f32[8 4] = mm(x, w)                                     p : f32[8 4] = mm(x, w)
        q : f32[8 4] = mm(y, v)                                     q : f32[8 4] = mm(y, v)
        a : f32[8 4] = add.Tensor(r, p)                     →       add : f32[8 4] = add.Tensor(p, q)
        b : f32[8 4] = add.Tensor(a, q)                             b : f32[8 4] = add.Tensor(add, r)

    A search keeps the ops of a program, so ``defer``, which needs layouts, comes too late for it. Only sums that
    nothing else reads, and that no constraint names, are reordered, within a phase. The sum of other addends stays in
    its order.

    Attributes:
        constraints: node name → the layout that the user wants.
    """

    constraints: Mapping[str, DistAttr] = field(default_factory=dict)
    strict: bool = False

    name: ClassVar[str] = "reassociate"
    takes: ClassVar[str] = "traced"
    gives: ClassVar[str] = "traced"

    def run(self, program: Program) -> None:
        ends = [node for node in program.nodes if _is_sum(node) and self._next(node) is None]
        chains = [(end, *self._chain(end)) for end in ends]
        chains = [chain for chain in chains if len(chain[2]) > 2]
        if not chains:
            return
        waiting = self._may_be_pending(program)
        with program.edit() as edit:
            for end, inner, addends in chains:
                _reorder(edit, end, inner, addends, waiting)

    def _next(self, node: fx.Node) -> fx.Node | None:
        """Return the next sum of the chain, if it alone reads this one."""
        user = next(iter(node.users), None)
        if user is None or len(node.users) > 1 or not _is_sum(user) or operands(user).count(node) > 1:
            return None
        same = record_of(node).phase == record_of(user).phase and tensor_type(node) == tensor_type(user)
        return user if same and node.name not in self.constraints else None

    def _chain(self, end: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the sums before the last one, and the addends of all, in order."""
        inner: list[fx.Node] = []
        addends: list[fx.Node] = []
        open_ = operands(end)[::-1]
        while open_:
            value = open_.pop()
            if _is_sum(value) and self._next(value) is not None:
                inner.append(value)
                open_ += operands(value)[::-1]
            else:
                addends.append(value)
        return inner, addends

    def _may_be_pending(self, program: Program) -> set[fx.Node]:
        """Return the values that an op can leave pending: it sums over a factor, or passes a pending operand on."""
        found: set[fx.Node] = set()
        for node in program.nodes:
            if node.op != "call_function":
                continue
            if is_getitem(node):
                found |= {node} if found.intersection(operands(node)) else set()
                continue
            bound = usable_rule(node, strict=self.strict)
            waits = [value in found for value in operands(node)]
            if bound.sums or any(all(waits[k] for k in alternative) for alternative in bound.linear):
                found.add(node)
        return found


def _is_sum(node: fx.Node) -> bool:
    """Return whether a node adds two values of its own shape and dtype."""
    if node.target is not ADD or node.kwargs or not isinstance(type := record_of(node).type, TensorType):
        return False
    return all(isinstance(value, fx.Node) and record_of(value).type == type for value in node.args)


def _reorder(edit: Edit, end: fx.Node, inner: list[fx.Node], addends: list[fx.Node], waiting: set[fx.Node]) -> None:
    first = [value for value in addends if value in waiting]
    others = [value for value in addends if value not in waiting]
    if len(first) < 2 or not others or addends[: len(first)] == first:
        return

    def total(values: list[fx.Node]) -> Value:
        sum_: Value = values[0]
        for value in values[1:]:
            sum_ = edit.insert(ADD, (sum_, value), before=end, type=tensor_type(end), about=end)
        return sum_

    sums = total(first), total(others)
    for k, (old, new) in enumerate(zip(operands(end), sums, strict=True)):
        edit.replace_use(end, old, new, index=k)
    for node in inner:
        edit.erase(node)
