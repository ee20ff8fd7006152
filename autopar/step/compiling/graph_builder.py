"""Build a traced program value by value."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture.decompose.subgraph import Ref, subgraph
from autopar.ir.constant import Constant
from autopar.ir.nodes import make_node, map_operands, record_of, set_record
from autopar.ir.program import Program
from autopar.ir.record import Record, Requirement, Result, TensorType
from autopar.ir.text.tokens import can_name


class GraphBuilder:
    """A traced program that is being built.

    Args:
        device: the device of its values.

    Attributes:
        phase: the phase of the values that are added next.
        about: the record whose module and source line they get.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.constants = device, dict[str, Constant]()
        self.phase, self.about = "forward", Record(None)
        self._graph = fx.Graph()
        self._names: set[str] = set()
        self._last_placeholder: fx.Node | None = None

    def placeholder(self, name: str, record: Record) -> fx.Node:
        """Add a placeholder behind the others. Its record keeps the user's name."""
        name = self._free("".join(c if c.isalnum() else "_" for c in name.lstrip(".")))
        node = make_node(self._graph, name, "placeholder", name, (), {})
        if self._last_placeholder is not None:
            self._last_placeholder.append(node)
        self._last_placeholder = node
        set_record(node, record._replace(name="" if record.name == name else record.name))
        return node

    def copy(self, node: fx.Node, values: Mapping[fx.Node, fx.Node], constants: Mapping[str, Constant]) -> fx.Node:
        """Copy a node of another program, on other operands. It keeps its name if that is free.

        ``constants``: those of the other program.
        """
        args, kwargs = map_operands(node.args, values.__getitem__), map_operands(dict(node.kwargs), values.__getitem__)
        name, target = self._free(node.name), node.target
        if node.op == "get_attr":
            self.constants[name] = constants[str(target)]
            target = name
        new = make_node(self._graph, name, node.op, target, args, kwargs)
        set_record(new, record_of(node))
        return new

    def transfer(
        self,
        name: str,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        record: Record,
    ) -> fx.Node:
        """Add a transfer of an explicit program."""
        node = make_node(self._graph, self._free(name), "call_function", function, args, dict(kwargs))
        set_record(node, record)
        return node

    def inline(
        self, function: Callable[..., object], *args: object, name: str | Sequence[str] = (), **kwargs: object
    ) -> Any:
        """Add the ops that a function of tensors runs, on these values. Returns its result, or a tuple of its results.

        Args:
            name: the name of the result, or of each result; without it, results are named after their ops.
        """
        nodes: list[fx.Node] = []

        def type_in(node: fx.Node) -> TensorType:
            nodes.append(node)
            return TensorType(type_of(node).shape, type_of(node).dtype)

        types, named_types = map_operands((args, kwargs), type_in)
        traced = subgraph(function, types, named_types, self.device)
        added: list[fx.Node] = []
        named = dict(zip(traced.results, (name,) if isinstance(name, str) else name, strict=False))

        def value(ref: object) -> Any:
            if isinstance(ref, (tuple, list)):
                return type(ref)(map(value, ref))
            if not isinstance(ref, Ref):
                return ref
            node = nodes[-ref.step - 1] if ref.step < 0 else added[ref.step]
            return node if ref.part is None else self._element(node, ref.part, named.get(ref, ""))

        for k, step in enumerate(traced.steps):
            base = named.get(Ref(k)) or step.target.__name__.partition(".")[0]
            node = make_node(
                self._graph,
                self._free(base),
                "call_function",
                step.target,
                value(step.args),
                {key: value(v) for key, v in step.kwargs.items()},
            )
            set_record(node, Record(step.type, phase=self.phase, module=self.about.module, source=self.about.source))
            added.append(node)
        results = tuple(None if ref is None else value(ref) for ref in traced.results)
        return results[0] if len(results) == 1 else results

    def arrange(self, order: Callable[[Sequence[fx.Node]], Sequence[fx.Node]]) -> None:
        """Reorder the values. In the new order each value must come after its operands."""
        ordered = order([node for node in self._graph.nodes if node.op != "placeholder"])
        for before, node in itertools.pairwise(ordered):
            before.append(node)

    def program(
        self,
        returned: Sequence[fx.Node],
        states: Mapping[fx.Node, fx.Node] | None = None,
        tree: tuple[str, ...] | None = None,
        gradients: Mapping[fx.Node, fx.Node] | None = None,
    ) -> Program:
        """Finish the program. Values that nothing reads are removed.

        Args:
            returned: the values that it returns.
            states: placeholder → the value that replaces it.
            tree: the structure of what is returned; without it, a tuple.
            gradients: placeholder → its gradient.
        """
        states, gradients = states or {}, gradients or {}
        placeholders = self._graph.find_nodes(op="placeholder")
        rows = [
            (node, kind, values[node])
            for kind, values in (("grad", gradients), ("state", states))
            for node in placeholders
            if node in values
        ]
        output = self._graph.output((*returned, *(value for _, _, value in rows)))
        results = (*(Result("return") for _ in returned), *(Result(kind, node.name) for node, kind, _ in rows))
        needs = (*(None for _ in returned), *(_in_dtype_of(node, value) for node, _, value in rows))
        set_record(output, Record(None, needs if any(needs) else (), results=results))
        for node in reversed(self._graph.nodes):
            if node.op in ("call_function", "get_attr") and not node.users:
                self._graph.erase_node(node)
        if tree is None:
            tree = () if not returned else ("(", *[", "] * (len(returned) - 1), ",)" if len(returned) == 1 else ")")
        read = {node.target for node in self._graph.nodes if node.op == "get_attr"}
        return Program(
            self._graph, tree=tree, constants={name: c for name, c in self.constants.items() if name in read}
        )

    def _element(self, node: fx.Node, part: int, name: str) -> fx.Node:
        known = next((user for user in node.users if user.target is operator.getitem and user.args[1] == part), None)
        if known is not None:
            return known
        new = make_node(self._graph, self._free(name or "getitem"), "call_function", operator.getitem, (node, part), {})
        types = record_of(node).type
        assert isinstance(types, tuple)
        set_record(new, Record(types[part], phase=self.phase, module=self.about.module, source=self.about.source))
        return new

    def _free(self, base: str) -> str:
        base = base if can_name(base) else f"{base}_1" if can_name(f"{base}_1") else f"value_{base}"
        name, k = base, 0
        while name in self._names:
            k += 1
            name = f"{base}_{k}"
        self._names.add(name)
        return name


def _in_dtype_of(state: fx.Node, value: fx.Node) -> Requirement | None:
    """What a state requires of its next value, which mixed precision may compute in another dtype."""
    dtype = type_of(state).dtype
    return None if type_of(value).dtype == dtype else Requirement(None, dtype)


def type_of(node: fx.Node) -> TensorType:
    """Return the type of a value that is one tensor."""
    type = record_of(node).type
    assert isinstance(type, TensorType)
    return type
