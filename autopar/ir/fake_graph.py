"""Make the graph with fake tensors that torch's own passes take, from a traced program and the types of its records."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.ir.nodes import make_node, map_operands, operands, record_of
from autopar.ir.program_data import ProgramData
from autopar.ir.record import Result, ValueType
from autopar.torch_private import FakeTensorMode


def is_early(value: fx.Node, result: Result) -> bool:
    """Return whether a result is available when the forward ends."""
    return result.kind != "grad" and record_of(value).phase == "forward"


def fake_graph(program: ProgramData) -> fx.GraphModule:
    """Return a traced program's graph in the form that torch's own passes take.

    Inputs are called ``primals_…`` and ``tangents_…``, and results of the forward come first. ``meta`` has a fake
    tensor for each value, and marks the ops of the backward. Ops keep their names. The fakes are made from types; no op
    runs.
    """
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    mode = FakeTensorMode()

    def fake(type: ValueType) -> Any:
        if isinstance(type, tuple):
            return tuple(map(fake, type))
        return None if type is None else torch.empty(type.shape, dtype=type.dtype, device="meta")

    for node in program.nodes:
        record = record_of(node)
        if node.op == "output":
            rows = list(zip(operands(node), record.results, strict=True))
            graph.output(tuple(nodes[value] for value, result in sorted(rows, key=lambda row: not is_early(*row))))
            break
        if node.op == "call_function":
            args, kwargs = (
                map_operands(node.args, nodes.__getitem__),
                map_operands(dict(node.kwargs), nodes.__getitem__),
            )
            nodes[node] = new = make_node(graph, node.name, node.op, node.target, args, kwargs)
        else:  # a constant is an input too
            nodes[node] = new = graph.placeholder(
                f"{'tangents' if record.role == 'tangent' else 'primals'}_{len(nodes)}"
            )
        with mode:
            new.meta["val"] = fake(record.type)
        if node.op == "call_function" and record.phase != "forward":
            new.meta["partitioner_tag"] = "must_be_in_backward"
    return fx.GraphModule({}, graph)
