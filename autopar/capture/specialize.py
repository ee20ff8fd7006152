"""Specialize the backward of a program to gradients of only some of the returned values.

    d_loss, d_logits : tangents                        d_loss : tangent
    a : = nll_loss_backward(d_loss, …)                 a : = nll_loss_backward(d_loss, …)
    b : = add(d_logits, a)                    →        grad w = mm(…, a)
    grad w = mm(…, b)
    grad only_of_logits = mm(…, d_logits)

Every op of a backward is linear in the tangents. A value that depends only on absent tangents is absent, and a sum with
an absent operand is its other operand. So a gradient that no tangent reaches is ``None``, as in eager, and not zero: an
optimizer with weight decay would change a parameter whose gradient is zero. Some gradients depend on no tangent (that
of ``copysign`` is always zero). Such a gradient is kept if the forward leads from its parameter or input to a value
whose tangent is present. The time is linear in the size of the graph.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.nodes import behind, is_getitem, make_node, map_operands, operands, record_of, set_record
from autopar.ir.program import Program
from autopar.ir.record import Record, Result, TensorType
from autopar.torch_private import aten

ADDITIONS = {aten.add.Tensor}


def specialize(program: Program, with_tangent: frozenset[int], device: torch.device) -> Program:
    """Return a traced program in which only the returned values at positions ``with_tangent`` have tangents.

    Args:
        device: where zeros are made, for the few ops that read an absent value beside a present one.
    """
    copy = _Specialized(program, with_tangent, device)
    for node in program.nodes:
        if node.op == "output":
            copy.output(node)
        else:
            copy.node(node)
    return Program(copy.graph, program.level, program.mesh, tree=program.tree, constants=program.constants)


class _Specialized:
    def __init__(self, program: Program, with_tangent: frozenset[int], device: torch.device) -> None:
        self.graph = fx.Graph()
        self.device = device
        self.with_tangent = with_tangent
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.absent: set[fx.Node] = set()
        self.from_tangents: set[fx.Node] = set()  # nodes of the old program, absent ones included
        self.names = {node.name for node in program.nodes}

    def node(self, node: fx.Node) -> None:
        record = record_of(node)
        if record.index is not None:
            self.from_tangents.add(node)
            if record.index not in self.with_tangent:
                self.absent.add(node)
                return
        dependent = [value for value in operands(node) if value in self.from_tangents]
        if dependent:
            self.from_tangents.add(node)
            present = [value for value in dependent if value not in self.absent]
            if not present:
                self.absent.add(node)
                return
            if len(present) < len(dependent) and node.target in ADDITIONS and self._is_other(node, present):
                self.nodes[node] = self.nodes[present[0]]
                return
        new = make_node(self.graph, node.name, node.op, node.target,
                        map_operands(node.args, lambda value: self._operand(value, record)),
                        map_operands(dict(node.kwargs), lambda value: self._operand(value, record)))  # fmt: skip
        set_record(new, record)
        self.nodes[node] = new

    def _is_other(self, node: fx.Node, present: list[fx.Node]) -> bool:
        """Return whether a sum with an absent operand equals the other operand, without scaling or broadcasting."""
        return (
            not node.kwargs
            and len(present) == 1
            and record_of(present[0]).type == record_of(node).type
            and not is_getitem(node)
        )

    def _operand(self, value: fx.Node, user: Record) -> fx.Node:
        """Return the new operand; an absent operand beside a present one becomes zero."""
        if value not in self.absent:
            return self.nodes[value]
        type = record_of(value).type
        assert isinstance(type, TensorType)
        name = f"{value.name}_zero"
        while name in self.names:
            name += "_"
        self.names.add(name)
        zero = make_node(self.graph, name, "call_function", aten.full.default, (list(type.shape), 0),
                         {"dtype": type.dtype, "device": self.device})  # fmt: skip
        set_record(zero, Record(type, phase=user.phase, module=user.module, source=user.source))
        return zero

    def output(self, node: fx.Node) -> None:
        record = record_of(node)
        returned = [
            value for value, result in zip(operands(node), record.results, strict=True) if result.kind == "return"
        ]
        leading = {node.name for node in behind(returned[index] for index in self.with_tangent)}
        results: list[tuple[fx.Node, Result]] = [
            (self.nodes[value], result)
            for value, result in zip(operands(node), record.results, strict=True)
            if value not in self.absent
            and (result.kind != "grad" or value in self.from_tangents or result.of in leading)
        ]
        new = self.graph.output(tuple(value for value, _ in results))
        set_record(new, Record(None, results=tuple(result for _, result in results)))
        self._sweep()

    def _sweep(self) -> None:
        for node in reversed(self.graph.nodes):
            if node.op == "call_function" and not node.users:
                self.graph.erase_node(node)
