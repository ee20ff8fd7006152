"""Find the value whose gradient a sum is, because a backward does not name it.

It follows from the readers of the sum and from its addends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.ir.nodes import operands, record_of
from autopar.ir.record import TensorType
from autopar.torch_private import OpOverload, aten

ADD: OpOverload = aten.add.Tensor
SUB: OpOverload = aten.sub.Tensor


@dataclass
class Summed:
    """The sums of gradients of one program, noted in reverse order.

    Attributes:
        results: call of the forward → its last op.
        returning: the calls that have a backward.
        of: sum → the value whose gradient it is, or several candidates.
    """

    results: dict[int, fx.Node] = field(default_factory=dict)
    returning: set[int] = field(default_factory=set)
    of: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    _behind: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    _calls: dict[fx.Node, frozenset[int]] = field(default_factory=dict)

    def note(self, node: fx.Node, output: fx.Node, homes: Mapping[fx.Node, Sequence[fx.Node]]) -> list[fx.Node]:
        """Return the value whose gradient a sum is, or several candidates; its readers must have been noted before.

        The sum is read by the backward of the call that computed the value, by the program's output if the value is a
        placeholder, or by another sum: of the same value, or of an operand from which an addition computes it, because
        the backward of an addition is no op. If there are several candidates, those count that are read by calls whose
        backward adds to the sum.

        Args:
            homes: gradient that the program returns → its placeholders.
        """
        candidates: dict[fx.Node, None] = {}
        for user in node.users:
            call = record_of(user).call
            if user is output:
                candidates |= dict.fromkeys(map(self._behind_additions, homes.get(node, ())))
            elif user in self.of:
                for value in self.of[user]:
                    candidates |= dict.fromkeys((value, *self._made_by_additions(value)))
            elif call is not None and call.number in self.results:
                candidates[self._behind_additions(self.results[call.number])] = None
        calls = {
            call.number
            for value in operands(node)
            if value not in self.of and (call := record_of(value).call) is not None
        }
        read = [value for value in candidates if not calls.isdisjoint(self._calls_on(value))]
        self.of[node] = read or list(candidates)
        return self.of[node]

    def _readers(self, value: fx.Node) -> list[fx.Node]:
        """Return the forward ops that read a value and contribute to its gradient, once for each read."""
        readers = []
        for user in value.users:
            record = record_of(user)
            returns = record.call is not None and record.call.number in self.returning
            if user.op == "output" or (record.phase == "forward" and (returns or hands_on(user, value))):
                readers += [user] * operands(user).count(value)
        return readers

    def _behind_additions(self, value: fx.Node) -> fx.Node:
        """Follow additions from a value to the first value with several readers that has the same gradient."""
        readers = self._readers(value)
        while len(readers) == 1 and hands_on(readers[0], value):
            (value,) = readers
            readers = self._readers(value)
        return value

    def _made_by_additions(self, value: fx.Node) -> list[fx.Node]:
        """Return the sums with several readers that a value is added to: the gradient of each is a sum too."""
        if value not in self._behind:
            behind = [self._behind_additions(reader) for reader in self._readers(value) if hands_on(reader, value)]
            self._behind[value] = [sum for sum in behind if len(self._readers(sum)) > 1]
        return self._behind[value]

    def _calls_on(self, value: fx.Node) -> frozenset[int]:
        """Return the calls whose backward computes a gradient of a value."""
        if value not in self._calls:
            calls = (record_of(user).call for user in value.users if not hands_on(user, value))
            self._calls[value] = frozenset(call.number for call in calls if call is not None)
        return self._calls[value]


def hands_on(node: fx.Node, value: fx.Node) -> bool:
    """Return whether an op is an addition whose gradient equals that of this operand."""
    values = operands(node)
    added = node.target is ADD or (node.target is SUB and values[0] is value)
    return added and not node.kwargs and values.count(value) == 1 and shape_of(value) == shape_of(node)


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    type = record_of(node).type
    return type.shape if isinstance(type, TensorType) else None
