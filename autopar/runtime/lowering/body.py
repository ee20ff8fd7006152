"""Write the body of a generated function as an FX graph, line by line.

The body records the values that are written so far, which of them have their own memory, and the node of the program
that each line computes. With a hunt, a line that looks for NaN follows each value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import called_op, map_operands, operands
from autopar.ir.program import Program
from autopar.rules.registry import rule_of
from autopar.runtime.anomaly import Hunt, is_looked_at, op_of
from autopar.runtime.lowering.reduction import Calls
from autopar.runtime.simulation.simulate import ANY_STRIDES
from autopar.torch_private import BoxedCodeGen, OpOverload, returns_alias


class Body:
    """The lines of one function.

    Args:
        gate: called before the first collective.
        hunt: checks each value for NaN after the op that computes it.
        own_memory: the placeholders whose memory the function may reuse.

    Attributes:
        values: node of the program → its value in the function.
        fresh: nodes whose values have their own memory.
        origins: name of a value of the function → the node of the program that it computes, wholly or in part.
        lines: call → its number among the calls.
        writers: value → the call that has overwritten it.
        last_placeholder: the last placeholder that is written.
        at: the node of the program whose line is written, for the progress bar.
    """

    def __init__(
        self,
        program: Program,
        gate: Callable[[], None] | None = None,
        hunt: Hunt | None = None,
        own_memory: frozenset[fx.Node] = frozenset(),
    ) -> None:
        self.program, self.gate, self.hunt = program, gate, hunt
        self.graph = fx.Graph()
        self.at: fx.Node | None = None
        self.values: dict[fx.Node, fx.Node] = {}
        self.fresh = set(own_memory)
        self.origins: dict[str, fx.Node] = {}
        self.lines: dict[fx.Node, int] = {}
        self.writers: dict[fx.Node, fx.Node] = {}
        if hunt is not None:  # bound once, because generated code refers to an object by its identity
            self.look, self.look_at_updates = hunt.look, hunt.look_at_updates

    def take(self, nodes: Sequence[fx.Node]) -> None:
        """Write the placeholders; constants are checked for NaN."""
        for node in nodes:
            self.values[node] = self.last_placeholder = self.graph.placeholder(node.name)
        for node in nodes:
            if node.op == "get_attr":
                self._check_for_nan(node, self.values[node])

    def give(self, nodes: Sequence[fx.Node]) -> None:
        """Write the output: the values of nodes."""
        self.graph.output([self.values[node] for node in nodes])
        self.graph.set_codegen(BoxedCodeGen())

    def operand(self, node: fx.Node) -> fx.Node:
        """Return the value of a node's first operand."""
        return self.values[operands(node)[0]]

    def compute(self, node: fx.Node) -> None:
        """Write an op of the program."""
        op = called_op(node)
        target = ANY_STRIDES.get(op, op)
        args, kwargs = map_operands((node.args, dict(node.kwargs)), self.values.__getitem__)
        self.values[node] = self.call(node, node.name, target, args, kwargs)
        if self._makes_memory(node):
            self.fresh.add(node)

    def apply(self, node: fx.Node, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Write a transfer that sends nothing: a function of its operand, or of all chunks that it joins."""
        values = [self.values[operand] for operand in operands(node)]
        joins = node.target is transfers.join_chunks
        self.values[node] = self.call(node, node.name, function, (values if joins else values[0], *args))
        if joins:
            self.fresh.add(node)

    def call(
        self,
        node: fx.Node,
        name: str,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
    ) -> fx.Node:
        """Write the call of a function that computes a node; pass another ``name`` if it computes only a part of it."""
        new = self.graph.create_node("call_function", target, args, dict(kwargs or {}), name=name)
        self.origins[new.name] = node
        self.lines[new] = len(self.lines)
        if name == node.name:
            self._check_for_nan(node, new)
        return new

    def calls(self, node: fx.Node, name: str, value: fx.Node, calls: Calls) -> fx.Node:
        """Apply functions one after the other; the last result gets the name."""
        for left, (function, args) in zip(range(len(calls))[::-1], calls, strict=True):
            value = self.call(node, f"{name}_{left}" if left else name, function, (value, *args))
        return value

    def receive(self, node: fx.Node, function: Callable[..., Any], args: tuple[Any, ...], after: Calls) -> None:
        """Write the wait for a collective, and the functions that are applied to the received data."""
        received = self.call(node, node.name + "_came" * bool(after), function, args)
        self.values[node] = self.calls(node, node.name, received, after)

    def open_gate(self) -> None:
        """Write the call of the gate before the first collective."""
        if self.gate is not None:
            self.graph.call_function(self.gate)
            self.gate = None

    def written_by(self, values: Iterable[fx.Node]) -> fx.Node:
        """Return the last of the calls that compute or overwrite values; the last placeholder if no call does."""
        last = max((self.writers.get(value, value) for value in values), key=lambda call: self.lines.get(call, -1))
        return last if last in self.lines else self.last_placeholder

    def is_last_of(self, value: fx.Node) -> bool:
        """Return whether a value has its own memory and one reader, which may overwrite it."""
        return value in self.fresh and len(value.users) == 1

    def _makes_memory(self, node: fx.Node) -> bool:
        """Return whether no other value shares the memory of a value: it is new, or a view of a value without other
        readers."""
        if not isinstance(node.target, OpOverload):
            return False
        if not returns_alias(node.target) and not rule_of(node.target).view:
            return True
        read = operands(node)
        return len(read) == 1 and self.is_last_of(read[0])

    def _check_for_nan(self, node: fx.Node, value: fx.Node) -> None:
        """Write a line after a value that looks for NaN."""
        if self.hunt is not None and is_looked_at(node):
            read = tuple(self.values.get(operand) for operand in operands(op_of(node)))
            self.graph.call_function(self.look, (node.name, value, read))
