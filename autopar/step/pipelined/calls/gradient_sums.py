"""Make the program of a call whose gradients add up on stages, as those of a micro-batch do.

    w : f32[8 4] = param                            w : f32[8 4] = param
    x : f32[6 4] = input                            x : f32[6 4] = input
    d_out : f32[6 8] = tangent(0)                   tangent_0 : f32[6 8] = input('.tangent.0')
    forward:                                        w_grad : f32[8 4] = state(w_grad_sum, 'w.grad')
      …                                             forward:
    backward:                                  →      …
      mm_1 : f32[6 4] = mm(d_out, w)                backward:
      mm_2 : f32[8 4] = mm(t, x)                      mm_1 : f32[6 4] = mm(tangent_0, w)
      return out                                      mm_2 : f32[8 4] = mm(t, x)
      grad w = mm_2                                   w_grad_sum : f32[8 4] = add.Tensor(w_grad, mm_2)
      grad x = mm_1                                   return (out, mm_1)

All stages have the tangents of outputs, as they have the inputs, so each stage begins its backward where its forward has
made an output. The gradient of a parameter that several stages read has a sum on each of them, and the gradients of
inputs are outputs of the backward.
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autopar.capture.specialize import specialize
from autopar.ir.nodes import name_of, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Record, TensorType
from autopar.ir.value_names import gradient_name
from autopar.step.compiling.graph_builder import GraphBuilder, type_of
from autopar.torch_private import aten


@dataclass(frozen=True)
class WithSums:
    """A traced call whose gradients add up.

    Attributes:
        program: the program.
        tangents: the placeholders of tangents.
        sums: placeholder of a sum → the parameter.
        inputs: the inputs whose gradients it returns behind its other outputs, in order.
    """

    program: Program
    tangents: tuple[fx.Node, ...]
    sums: dict[str, str]
    inputs: tuple[str, ...]


def tangent_name(position: int) -> str:
    """Return the name of the tangent of an output: ``.tangent.0``."""
    return f".tangent.{position}"


def with_sums(traced: Program, positions: frozenset[int], device: torch.device) -> WithSums:
    """Make the program of a call with the tangents of some outputs. Linear in the graph.

    ``traced``: the captured call, with a tangent for each differentiable output.
    """
    traced, builder = specialize(traced, positions, device), GraphBuilder(device)
    rows = list(zip(operands(traced.output), record_of(traced.output).results, strict=True))
    homes = {node.name: node for node in traced.placeholders}
    made = {homes[result.of]: node for node, result in rows if result.kind == "grad"}
    of_parameters = {home: node for home, node in made.items() if record_of(home).role == "param"}
    values: dict[fx.Node, fx.Node] = {}
    last = ("tangent", "seed")  # after all other placeholders
    for node in traced.placeholders:
        if (record := record_of(node)).role not in last:
            values[node] = builder.placeholder(node.name, record._replace(name=name_of(node)))
    sums = {home: builder.placeholder(gradient_name(name_of(home)), _state(home)) for home in of_parameters}
    tangents = []
    for node in traced.placeholders:
        if (record := record_of(node)).role == "tangent":
            assert record.index is not None
            name = tangent_name(record.index)
            tangents.append(builder.placeholder(name, Record(type_of(node), role="input", name=name)))
            values[node] = tangents[-1]
    for node in traced.placeholders:
        if (record := record_of(node)).role == "seed":
            values[node] = builder.placeholder(node.name, record._replace(name=name_of(node)))
    for node in traced.nodes:
        if node.op in ("call_function", "get_attr"):
            values[node] = builder.copy(node, values, traced.constants)
    states = {values[homes[result.of]]: values[node] for node, result in rows if result.kind == "state"}
    builder.phase = "backward"
    for home, node in of_parameters.items():
        builder.about = record_of(node)
        states[sums[home]] = builder.inline(aten.add.Tensor, sums[home], values[node], name=f"{sums[home].name}_sum")
    inputs = {name_of(home): values[node] for home, node in made.items() if home not in sums}
    returned = [values[node] for node, result in rows if result.kind == "return"]
    program = builder.program([*returned, *inputs.values()], states)
    own = {sum.name: name_of(home) for home, sum in sums.items()}
    return WithSums(program, tuple(tangents), own, tuple(inputs))


def _state(parameter: fx.Node) -> Record:
    type = type_of(parameter)
    return Record(TensorType(type.shape, type.dtype), role="state", name=gradient_name(name_of(parameter)))
