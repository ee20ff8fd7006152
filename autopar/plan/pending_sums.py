"""Decide whether a pending sum passes through an op or is reduced before it: where fewer elements are reduced.

The decision looks ahead at the readers of a value, before these are placed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autopar.errors import RuleError
from autopar.ir.layout import DistAttr
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType, ValueType
from autopar.plan.boundary import ADDITIONS
from autopar.rules.binding import bind_node
from autopar.rules.registry import RULES

READERS = 4  # the most readers of a value that is reduced after them, because each reduction has a start-up cost


@dataclass(frozen=True, eq=False)
class PendingSums:
    """Where the pending sums of a program are reduced.

    Attributes:
        program: the program.
        additions_to_sums: ops that add to sums of gradients or losses, where what they add may stay pending.
    """

    program: Program
    additions_to_sums: frozenset[fx.Node]

    def passing_operands(
        self, node: fx.Node, homes: Sequence[DistAttr], types: Mapping[fx.Node, ValueType]
    ) -> frozenset[int]:
        """Return the operands whose pending sum should pass, or that should become pending.

        A pending sum passes if fewer elements are reduced after all its readers than here. An operand of an addition
        becomes pending beside a pending operand if the result is added to a sum of gradients or losses.

        Args:
            homes: the attribute of each operand.
            types: the values that are placed already.
        """
        if node.target in ADDITIONS and self.least[node] == 0 and node not in self.additions_to_sums:
            return frozenset(k for k, home in enumerate(homes) if not home.pending)
        return frozenset(
            k for k, (value, home) in enumerate(zip(operands(node), homes, strict=True))
            if home.pending and _passes(node, k) and self.reduced_behind(value, types) < _size(value)
        )  # fmt: skip

    def reduced_behind(self, value: fx.Node, types: Mapping[fx.Node, ValueType]) -> float:
        """Return how many elements are reduced if a pending value is not reduced here.

        A value that is added to another pending value costs none.
        """
        if len(value.users) > READERS or not all(self.passes_on(user, value) for user in value.users):
            return math.inf
        return sum(
            0
            if user.users and all(_adds_to_pending(reader, user, types) for reader in user.users)
            else self.least[user]
            for user in value.users
        )  # fmt: skip

    @cached_property
    def least(self) -> dict[fx.Node, float]:
        """How many elements of a value are reduced at least, if it is pending.

        It may be reduced here or after its readers. Linear in the graph.
        """
        least: dict[fx.Node, float] = {}
        for node in reversed(self.program.graph.nodes):
            if node.op == "call_function":
                passed = 0 < len(node.users) <= READERS and all(self.passes_on(user, node) for user in node.users)
                later = (
                    sum(least[user] / (len(operands(user)) if user.target in ADDITIONS else 1) for user in node.users)
                    if passed
                    else math.inf
                )
                least[node] = 0 if node in self.additions_to_sums else min(_size(node), later)
        return least

    def passes_on(self, user: fx.Node, value: fx.Node) -> bool:
        """Return whether a pending value passes through a reader.

        Terms of a loss, which are scalars, pass: they are added first and reduced once.
        """
        return (
            user in self.additions_to_sums
            or _passes_all(user, value)
            or (user.target in ADDITIONS and _size(user) == 1)
        )


def _adds_to_pending(user: fx.Node, node: fx.Node, types: Mapping[fx.Node, ValueType]) -> bool:
    if user.target not in ADDITIONS:
        return False
    others = [types.get(value) for value in operands(user) if value is not node]
    return all(isinstance(type, TensorType) and bool(type.attr.pending) for type in others)


def _passes_all(user: fx.Node, value: fx.Node) -> bool:
    return all(_passes(user, k) for k, operand in enumerate(operands(user)) if operand is value)


def _passes(node: fx.Node, position: int) -> bool:
    """Return whether a sum passes through an op by this operand alone, and the result has no more elements."""
    if node.op != "call_function" or node.target not in RULES:
        return False
    try:
        bound = bind_node(node)
    except RuleError:  # raised again when the op is placed, with its line
        return False
    if (position,) not in bound.linear or bound.result_shapes[0] is None or len(bound.result_shapes) > 1:
        return False
    return math.prod(bound.result_shapes[0]) <= math.prod(bound.operand_shapes[position])


def _size(node: fx.Node) -> float:
    type = record_of(node).type
    return math.prod(type.shape) if isinstance(type, TensorType) else math.inf
