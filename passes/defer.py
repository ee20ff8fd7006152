"""Defer reductions: add pending values of one sum first, and reduce the sum once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from autopar.ir.edit import Edit, Value
from autopar.ir.layout import Layout
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Requirement, TensorType
from autopar.passes.manager import Pass
from autopar.torch_private import aten

ADD = aten.add.Tensor


@dataclass(frozen=True)
class Defer(Pass):
    """Reorder a chain of additions so that addends that are pending over the same axes come first.

        a : f32[8 4] = add.Tensor(r, p as [8 4])                    add : f32[8 4] +tp = add.Tensor(p, q)
        b : f32[8 4] = add.Tensor(a, q as [8 4])            →       b : f32[8 4] = add.Tensor(r, add as [8 4])

    Here ``p`` and ``q`` are pending over tp and ``r`` is not, so two reductions become one. The gradients of a value
    that several products and a residual read are such a chain. Only sums that nothing else reads are reordered, within
    a phase.
    """

    name: ClassVar[str] = "defer"
    takes: ClassVar[str] = "placed"
    gives: ClassVar[str] = "placed"

    def run(self, program: Program) -> None:
        with program.edit() as edit:
            for node in program.nodes:
                if _is_sum(node) and not _continues(node):
                    _reorder(edit, node)


def _is_sum(node: fx.Node) -> bool:
    """Return whether a node adds two values of its own shape and dtype, and is not pending."""
    type_of_sum = record_of(node).type
    return node.target is ADD and not node.kwargs and isinstance(type_of_sum,
                                                                 TensorType) and not type_of_sum.attr.pending and all(
        isinstance(value, fx.Node)
        and isinstance(type := record_of(value).type, TensorType)
        and (type.shape, type.dtype) == (type_of_sum.shape, type_of_sum.dtype)
        for value in node.args
    )  # fmt: skip


def _continues(node: fx.Node) -> bool:
    """Return whether only the next sum of the chain reads a sum, in its own layout."""
    user = next(iter(node.users), None)
    if user is None or len(node.users) > 1 or not _is_sum(user) or operands(user).count(node) > 1:
        return False
    record, next_record = record_of(node), record_of(user)
    return (
        record.phase == next_record.phase
        and record.type == next_record.type
        and isinstance(record.type, TensorType)
        and _needs(user)[node] == record.type.layout
    )


def _needs(node: fx.Node) -> dict[fx.Node, Layout | None]:
    return {
        value: None if need is None else need.layout
        for value, need in zip(operands(node), record_of(node).uses, strict=True)
    }


def _reorder(edit: Edit, last: fx.Node) -> None:
    inner: list[fx.Node] = []
    addends: list[fx.Node] = []
    open_ = operands(last)[::-1]
    while open_:
        value = open_.pop()
        if _is_sum(value) and _continues(value):
            inner.append(value)
            open_ += operands(value)[::-1]
        else:
            addends.append(value)
    type = record_of(last).type
    assert isinstance(type, TensorType)
    if any(need != type.layout for node in (last, *inner) for need in _needs(node).values()):
        return
    groups: dict[Layout | None, list[Value]] = {}
    for value in addends:
        value_type = record_of(value).type
        assert isinstance(value_type, TensorType) and value_type.layout is not None
        # a sum of maxima is not a maximum
        waits = value_type.attr.pending and all(kind == "sum" for _, kind in value_type.attr.pending)
        groups.setdefault(value_type.layout if waits else type.layout, []).append(value)
    if len(groups) < 2 or not any(layout != type.layout and len(group) > 1 for layout, group in groups.items()):
        return

    def total(values: list[Value], layout: Layout | None) -> Value:
        assert layout is not None
        first, *others = values
        for value in others:
            need = Requirement(layout, type.dtype)
            first = edit.insert(
                ADD, (first, value), before=last, type=TensorType(type.shape, type.dtype, layout), uses=(need, need)
            )
        return first

    sums = [total(group, layout) for layout, group in groups.items()]
    for k, (old, new) in enumerate(zip(operands(last), (total(sums[:-1], type.layout), sums[-1]), strict=True)):
        edit.replace_use(last, old, new, index=k)
    for node in inner:
        edit.erase(node)
