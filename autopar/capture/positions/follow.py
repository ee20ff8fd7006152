"""Follow a graph while it is traced, and know what its tensors hold by their positions."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
from torch import fx

from autopar.capture.positions.holds import NotByPosition, Operand, Positional, Shape, is_exact, settled
from autopar.capture.positions.rules import RULES
from autopar.torch_private import OpOverload, mutates, returns_alias, size_expression

# arguments that the result tells
ASIDE = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking", "implicit"})


def _shape(tensor: torch.Tensor) -> Shape:
    return tuple(size_expression(size) for size in tensor.shape)


class PositionsOf:
    """Follows a graph while it grows. Linear in the graph: each node is looked at once."""

    def __init__(self) -> None:
        self._found: dict[fx.Node, Positional | None] = {}
        self._memory: dict[fx.Node, fx.Node] = {}  # view → the node whose memory it shares
        self._written: set[fx.Node] = set()  # those that an op writes into
        self._last: fx.Node | None = None

    def at(self, node: fx.Node) -> Positional | None:
        """Return what a node of the graph holds; ``None`` if that does not follow from positions alone."""
        graph = node.graph
        following = next(iter(graph.nodes)) if self._last is None else self._last.next
        while following.op != "root":
            self._look_at(following)
            self._last, following = following, following.next
        return self._value(node)

    def _value(self, node: fx.Node) -> Positional | None:
        return None if self._memory.get(node, node) in self._written else self._found.get(node)

    def _look_at(self, node: fx.Node) -> None:
        if node.op != "call_function":
            return
        if node.target is operator.getitem:
            self._share(node)
            return
        if not isinstance(node.target, OpOverload) or mutates(node.target):  # an op of higher order may write
            self._written |= {self._memory.get(value, value) for value in node.all_input_nodes}
            return
        if returns_alias(node.target) or "unsafe" in node.target.name():
            self._share(node)
        rule = RULES.get(node.target.overloadpacket.__name__) if node.target.namespace == "aten" else None
        made = node.meta.get("val")
        if rule is None or not isinstance(made, torch.Tensor):
            return
        if not node.kwargs.keys() <= ASIDE:
            return
        with contextlib.suppress(Exception):  # what has no rule, or has other arguments, is not known
            found = settled(rule(_shape(made), made.dtype, *self._operand(node.args)), _shape(made))
            if is_exact(found, made.dtype):
                self._found[node] = found

    def _share(self, node: fx.Node) -> None:
        """Note that a node is in the memory of its operand."""
        for first in node.all_input_nodes[:1]:
            self._memory[node] = self._memory.get(first, first)

    def _operand(self, value: Any) -> Any:
        """Return an argument of an op, with tensors as what they hold."""
        if isinstance(value, (list, tuple)):
            return [self._operand(part) for part in value]
        if isinstance(value, torch.SymInt):
            return size_expression(value)
        if not isinstance(value, fx.Node):
            return value
        made = value.meta.get("val")
        if isinstance(made, (torch.SymInt, int)):
            return size_expression(made)
        if not isinstance(made, torch.Tensor) or (found := self._value(value)) is None:
            raise NotByPosition
        return Operand(found, _shape(made), made.dtype)
