"""List the inputs and outputs of a step, with names, types and roles, from the explicit program."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.mesh import Mesh
from autopar.ir.nodes import operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import TensorType


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of a step.

    Attributes:
        mesh: the mesh of the program.
        types: placeholder → its global type, with the Layout of its pieces.
        arguments: the placeholders that are not tangents, in order: parameters, buffers, inputs.
        tangents: position of a returned value → the placeholder of its tangent.
        returned: each returned value and its type, in order.
        states: placeholder → the value that replaces it, and its type.
        gradients: placeholder → its gradient, and its type.
    """

    mesh: Mesh
    types: dict[str, TensorType]
    arguments: tuple[str, ...]
    tangents: dict[int, str]
    returned: tuple[tuple[str, TensorType], ...]
    states: dict[str, tuple[str, TensorType]]
    gradients: dict[str, tuple[str, TensorType]]

    @staticmethod
    def of(explicit: Program) -> Interface:
        assert explicit.mesh is not None
        records = {node.name: record_of(node) for node in explicit.placeholders}
        rows = [
            (result, node.name, tensor_type(node))
            for node, result in zip(operands(explicit.output), record_of(explicit.output).results, strict=True)
        ]
        return Interface(
            explicit.mesh,
            {name: r.type for name, r in records.items() if isinstance(r.type, TensorType)},
            tuple(name for name, r in records.items() if r.role != "tangent"),
            {r.index: name for name, r in records.items() if r.index is not None},
            tuple((name, type) for result, name, type in rows if result.kind == "return"),
            {result.of: (name, type) for result, name, type in rows if result.kind == "state"},
            {result.of: (name, type) for result, name, type in rows if result.kind == "grad"},
        )
