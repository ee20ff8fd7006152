"""Give a view or a cast the Layout that its readers need, so that the transfers come before it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from autopar.costs.machine import Machine
from autopar.ir.nodes import is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Record, Requirement, TensorType
from autopar.passes.manager import Pass
from autopar.rules.binding import bind_node
from autopar.rules.pointwise import CASTS
from autopar.transitions import price


@dataclass(frozen=True)
class Follow(Pass):
    """Give a view or a cast another Layout if all its uses need that Layout, and require it of the operand.

        y : f32[8/tp 4] = …                                        y : f32[8/tp 4] = …
        t : f32[4 8/tp] = t(y)                              →      t : f32[4 8] = t(y as [8 4])
        a : f32[4 4] = mm(t as [4 8], b)                           a : f32[4 4] = mm(t, b)
        c : f32[8 2] = mm(y as [8 4], d)                           c : f32[8 2] = mm(y as [8 4], d)

    So two transfers of two views of one value become one transfer of the value, and the gradient of a cast parameter is
    reduced to the parameter's pieces before it is cast back. The pass never moves more bytes, never crosses phases (a
    value that the forward keeps for the backward stays split), and never changes a pending value, whose sum passes
    through views. It walks backwards, in linear time, so that whole chains change.

    Attributes:
        machine: the machine whose nanoseconds are compared; without one moved bytes are.
    """

    name: ClassVar[str] = "follow"
    takes: ClassVar[str] = "placed"
    gives: ClassVar[str] = "placed"

    machine: Machine | None = None

    def run(self, program: Program) -> None:
        changed: dict[fx.Node, Record] = {}
        for node in reversed(program.graph.nodes):
            if node.op == "call_function" and not is_getitem(node):
                record = _followed(node, changed, self.machine)
                if record is not None:
                    changed[node] = record
        with program.edit() as edit:
            for node, record in changed.items():
                edit.annotate(node, type=record.type, uses=record.uses)


def _followed(node: fx.Node, changed: dict[fx.Node, Record], machine: Machine | None) -> Record | None:
    """Return the record of a view or a cast with the Layout that its readers need; ``None`` if it does not change."""
    record = record_of(node)
    have = record.type
    casts = node.target in CASTS
    if (
        len(record.uses) != 1
        or not isinstance(have, TensorType)
        or have.attr.pending
        or not (casts or bind_node(node).rule.view)
    ):
        return None
    if any(user.op == "output" and not (casts and _is_gradient(node, user)) for user in node.users):
        return None
    needs = {(need, about.phase == record.phase or user.op == "output")
              for user in node.users for about in (changed.get(user) or record_of(user),)
              for value, need in zip(operands(user), about.uses, strict=True) if value is node}  # fmt: skip
    if len(needs) != 1:
        return None
    need, same_phase = needs.pop()
    if (
        need is None
        or not same_phase
        or need.dtype != have.dtype
        or have.layout in (None, need.layout)
        or need.placed.attr.pending
    ):
        return None
    bound, required = bind_node(node), need.placed
    (value,) = operands(node)
    source = record_of(value).type
    operand_attr = bound.before(required.attr, required.mesh)
    if operand_attr is None or not isinstance(source, TensorType):
        return None
    current = record.uses[0]
    before = Requirement(replace(required, attr=operand_attr), source.dtype if current is None else current.dtype)
    new = replace(have, layout=required)
    paid = price(have, new, machine)
    if current is not None:
        paid += price(source, replace(source, layout=current.layout), machine)
    if price(source, replace(source, layout=before.layout), machine) > paid:
        return None
    return record._replace(type=new, uses=(before,))


def _is_gradient(value: fx.Node, output: fx.Node) -> bool:
    """Return whether the program returns a value only as a gradient."""
    results = zip(operands(output), record_of(output).results, strict=True)
    return all(result.kind == "grad" for returned, result in results if returned is value)
