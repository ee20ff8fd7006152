"""Find the updates and sums that a program can compute in place, in memory that the caller donates to it.

    w_grad_sum : f32[8 4] = add.Tensor(w_grad, mm)      w_grad_sum = torch.ops.aten.add_.Tensor(w_grad, mm)
    adamw = autopar::adamw(w, g, m, v, step, …)    →    adamw_in_place = update([w, w_1], [g, g_1], [[m, m_1], …], …)
    adamw_1 = autopar::adamw(w_1, g_1, m_1, …)

Gradients are added to their sums in place; if a sum starts as zeros, the first gradient takes its place. The updates of
parameters whose optimizer has the same numbers are one fused kernel (``optimizers.IN_PLACE``). A value is overwritten
only if nothing reads it afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.ir.nodes import called_op, element_of, is_getitem, node_at, operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.optimizers import IN_PLACE, SHARED
from autopar.rules.registry import rule_of
from autopar.torch_private import OpOverload, returns_alias

ADD = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class Donated:
    """The memory that a program may write to.

    Attributes:
        placeholders: the placeholders whose memory the program may reuse.
        sums: an addition to one of them, which nothing else reads → that placeholder.
        zeros: placeholders of sums that are not passed, because they are zero.
        buckets: the last of several updates → all of them, which run as one op, in place.
        offloaded: whether the updates run on the host, where the optimizer's state is.
    """

    placeholders: frozenset[fx.Node] = frozenset()
    sums: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    zeros: frozenset[fx.Node] = frozenset()
    buckets: Mapping[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    offloaded: bool = False

    @property
    def updates(self) -> set[fx.Node]:
        """All updates that run in place."""
        return {node for bucket in self.buckets.values() for node in bucket}

    @staticmethod
    def of(program: Program, names: Collection[str], zeros: Collection[str] = (), offloaded: bool = False) -> Donated:
        """Analyse a program. Linear in the graph.

        Of an explicit program, the updates that could run as one op are found. Of a scheduled program, those that its
        order puts side by side do.

        Args:
            names: the placeholders that are donated.
        """
        donated = frozenset(node for node in program.placeholders if node.name in names)
        sums = {}
        for node in donated:
            value = next(iter(node.users), node)
            if (
                len(node.users) == 1
                and value.target is ADD
                and value.args[0] is node
                and isinstance(value.args[1], fx.Node)
                and not value.kwargs
                and value.args[1] is not node
            ):
                sums[value] = node
        empty = frozenset(node for node in sums.values() if node.name in zeros)
        groups = (_side_by_side if program.level == "scheduled" else _update_groups)(program, donated)
        return Donated(donated, sums, empty, {updates[-1]: tuple(updates) for updates in groups}, offloaded)


def _update_groups(program: Program, donated: frozenset[fx.Node]) -> list[list[fx.Node]]:
    """Group updates with the same numbers that can run as one op at the place of the last one.

    Nothing may read a result earlier.
    """
    open_: dict[object, list[fx.Node]] = {}
    done: list[list[fx.Node]] = []
    keys: dict[fx.Node, object] = {}
    for node in program.nodes:
        for value in operands(node) if not is_getitem(node) else ():
            update = node_at(value) if is_getitem(value) else value
            if keys.get(update) in open_:
                done.append(open_.pop(keys[update]))
        if node.target in IN_PLACE and all(_is_last(value, node, donated) for value in _written(node)):
            keys[node] = key = numbers_of(node)
            open_.setdefault(key, []).append(node)
    return [*done, *open_.values()]


def _side_by_side(program: Program, donated: frozenset[fx.Node]) -> list[list[fx.Node]]:
    """Group updates with the same numbers that stand side by side; only their results may stand between them."""
    groups: list[list[fx.Node]] = []
    last: object = None
    for node in program.nodes:
        if node.target in IN_PLACE and all(_is_last(value, node, donated) for value in _written(node)):
            if (key := numbers_of(node)) != last:
                groups.append([])
            groups[-1].append(node)
            last = key
        elif not is_getitem(node):
            last = None
    return groups


def _written(update: fx.Node) -> Sequence[fx.Node]:
    """Return the parameter and the states that have its layout: as many values as the op has results."""
    results = record_of(update).type
    count = len(results) if isinstance(results, tuple) else 1
    parameter, _, *states = operands(update)
    return parameter, *states[: count - 1]


def _is_last(value: fx.Node, update: fx.Node, donated: frozenset[fx.Node]) -> bool:
    """Return whether a value has its own memory and is not read beside an update or after it."""
    others = [user for user in value.users if user is not update]
    if (
        any(user.op == "output" or record_of(user).phase == "update" for user in others)
        or operands(update).count(value) != 1
    ):
        return False
    if value.op == "placeholder":
        return value in donated
    if is_getitem(value) or not isinstance(value.target, OpOverload):
        return not is_getitem(value)  # transfers make new memory
    return not returns_alias(value.target) and not rule_of(value.target).view


def numbers_of(update: fx.Node) -> object:
    """Return what updates that run as one op have in common: the op, its numbers, and the shared operands."""
    dtypes = tuple(tensor_type(value).dtype for value in _written(update))
    return update.target, update.args[-SHARED[called_op(update)] :], tuple(update.kwargs.items()), dtypes


def updated_together(updates: Sequence[fx.Node]) -> tuple[list[list[Any]], tuple[Any, ...]]:
    """Return the arguments of updates that run as one op: a list for each operand, and what they share."""
    first = updates[0]
    count = len(first.args) - SHARED[called_op(first)]
    columns = [[update.args[k] for update in updates] for k in range(count)]
    return columns, first.args[count:]


def overwritten(result: fx.Node) -> fx.Node:
    """Return the operand of an update whose memory a result of it takes: the parameter, or a state behind the
    gradient."""
    update, element = element_of(result) if is_getitem(result) else (result, 0)
    value = update.args[element and element + 1]
    assert isinstance(value, fx.Node)
    return value
