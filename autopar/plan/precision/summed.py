"""Of which value a sum of gradients is. A backward does not say it, so it is told by who takes the sum, and by who adds to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.ir.nodes import operands, record_of
from autopar.ir.record import TensorType
from autopar.torch_private import OpOverload

ADD: OpOverload = torch.ops.aten.add.Tensor
SUB: OpOverload = torch.ops.aten.sub.Tensor


@dataclass
class Summed:
    """The sums of gradients of one program, noted backwards.

    Attributes:
        results: call of the forward → its last op.
        returning: the calls that have a backward.
        of: a sum → the value that it is the gradient of, or some that it may be.
    """

    results: dict[int, fx.Node] = field(default_factory=dict)
    returning: set[int] = field(default_factory=set)
    of: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    _behind: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    _calls: dict[fx.Node, frozenset[int]] = field(default_factory=dict)

    def note(self, node: fx.Node, output: fx.Node, homes: Mapping[fx.Node, Sequence[fx.Node]]) -> list[fx.Node]:
        """What a sum is of; those that take it have been noted.

        It goes to the backward of the call that made the value, to the program's output for a placeholder, or to another sum: of the
        same value, or of one that is added to something to make it. An addition hands a gradient on, without an op. Of several that
        this leaves, it is one that the calls read whose backward adds to it.

        Args:
            homes: gradients that the program gives → the placeholders that they are of.
        """
        found: dict[fx.Node, None] = {}
        for user in node.users:
            call = record_of(user).call
            if user is output:
                found |= dict.fromkeys(map(self._behind_additions, homes.get(node, ())))
            elif user in self.of:
                for value in self.of[user]:
                    found |= dict.fromkeys((value, *self._made_by_additions(value)))
            elif call is not None and call.number in self.results:
                found[self._behind_additions(self.results[call.number])] = None
        calls = {call.number for value in operands(node) if value not in self.of and (call := record_of(value).call) is not None}
        read = [value for value in found if not calls.isdisjoint(self._calls_on(value))]
        self.of[node] = read or list(found)
        return self.of[node]

    def _readers(self, value: fx.Node) -> list[fx.Node]:
        """Those who read a value in the forward and give it a gradient, as often as they read it."""
        found = []
        for user in value.users:
            record = record_of(user)
            returns = record.call is not None and record.call.number in self.returning
            if user.op == "output" or (record.phase == "forward" and (returns or hands_on(user, value))):
                found += [user] * operands(user).count(value)
        return found

    def _behind_additions(self, value: fx.Node) -> fx.Node:
        """The first value that several read, of those that have the gradient of this one: additions hand it on."""
        readers = self._readers(value)
        while len(readers) == 1 and hands_on(readers[0], value):
            (value,) = readers
            readers = self._readers(value)
        return value

    def _made_by_additions(self, value: fx.Node) -> list[fx.Node]:
        """What a value is added to, where several read that: its gradient is a sum, too."""
        if value not in self._behind:
            behind = [self._behind_additions(reader) for reader in self._readers(value) if hands_on(reader, value)]
            self._behind[value] = [one for one in behind if len(self._readers(one)) > 1]
        return self._behind[value]

    def _calls_on(self, value: fx.Node) -> frozenset[int]:
        """The calls whose backward makes a gradient of a value."""
        if value not in self._calls:
            calls = (record_of(user).call for user in value.users if not hands_on(user, value))
            self._calls[value] = frozenset(call.number for call in calls if call is not None)
        return self._calls[value]


def hands_on(node: fx.Node, value: fx.Node) -> bool:
    """Whether the gradient of an op's result is that of an operand, as it is."""
    values = operands(node)
    added = node.target is ADD or (node.target is SUB and values[0] is value)
    return added and not node.kwargs and values.count(value) == 1 and shape_of(value) == shape_of(node)


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    type = record_of(node).type
    return type.shape if isinstance(type, TensorType) else None
