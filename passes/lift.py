"""Lift a reduction above several views of one value, so that it is done once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from autopar.ir.nodes import is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Requirement, TensorType
from autopar.passes.manager import Pass
from autopar.rules.binding import bind_node


@dataclass(frozen=True)
class Lift(Pass):
    """If readers of a pending value and of its views need it reduced, take the views of the reduced value.

        v : f32[8 4] +tp = …                                       v : f32[8 4] +tp = …
        t : f32[4 8] +tp = t(v)                             →      t : f32[4 8] = t(v as [8 4])
        a : f32[8 2] = mm(v as [8 4], b)                           a : f32[8 2] = mm(v as [8 4], b)
        c : f32[4 2] = mm(t as [4 8], d)                           c : f32[4 2] = mm(t, d)

    Two reductions of the same numbers become one. A view that a sum of pending values reads stays pending. Any other op
    with one operand and one result through which a sum passes, such as the sum over a dim, counts as a view. The pass
    works within a phase, and is linear in the graph.
    """

    name: ClassVar[str] = "lift"
    takes: ClassVar[str] = "placed"
    gives: ClassVar[str] = "placed"

    def run(self, program: Program) -> None:
        output = program.output
        returned: dict[fx.Node, list[Requirement | None]] = {}
        for value, need in zip(operands(output), record_of(output).uses, strict=True):
            returned.setdefault(value, []).append(need)

        def reduces(user: fx.Node, value: fx.Node) -> bool:
            return _needs(value, returned[value]) if user is output else _reduces(user, value)

        waiting: set[fx.Node] = set()  # views that all their readers need reduced
        for node in reversed(program.graph.nodes):
            if _is_pending_view(node) and all(user in waiting or reduces(user, node) for user in node.users):
                waiting.add(node)
        lifted: dict[fx.Node, TensorType] = {}
        reductions: dict[fx.Node, int] = {}  # value → the number of readers that need it reduced
        with program.edit() as edit:
            for node in program.nodes:
                if node not in waiting:
                    continue
                (value,) = operands(node)
                if value not in reductions:
                    reductions[value] = sum(user in waiting or reduces(user, value) for user in value.users)
                if value not in lifted and reductions[value] < 2:
                    continue
                type = lifted.get(value) or _reduced(value)
                lifted[node] = _reduced(node)
                assert type.layout is not None
                edit.annotate(node, type=lifted[node], uses=(Requirement(type.layout, type.dtype),))


def _is_pending_view(node: fx.Node) -> bool:
    type = record_of(node).type
    if node.op != "call_function" or is_getitem(node) or not isinstance(type, TensorType) or not type.attr.pending:
        return False
    if len(operands(node)) != 1 or not bind_node(node).linear:
        return False
    value, (need,) = record_of(operands(node)[0]), record_of(node).uses
    return (
        isinstance(value.type, TensorType)
        and need is not None
        and need.layout == value.type.layout
        and value.phase == record_of(node).phase
        and value.type.attr.pending == type.attr.pending
    )


def _reduced(node: fx.Node) -> TensorType:
    type = record_of(node).type
    assert isinstance(type, TensorType) and type.layout is not None
    return replace(type, layout=replace(type.layout, attr=type.attr.without_pending()))


def _reduces(user: fx.Node, value: fx.Node) -> bool:
    """Return whether a reader in the same phase needs a pending value reduced, with its splits unchanged."""
    about = record_of(user)
    if about.phase != record_of(value).phase:
        return False
    return _needs(value, [need for operand, need in zip(operands(user), about.uses, strict=True) if operand is value])


def _needs(value: fx.Node, needs: Sequence[Requirement | None]) -> bool:
    layout = _reduced(value).layout
    return all(need is not None and need.layout == layout for need in needs)
