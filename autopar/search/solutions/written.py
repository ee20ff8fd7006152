"""Write the layouts of a plan into its traced program, with the expansions of the ops that it opens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.capture.decompose.expanded import CPU, Insertion, expand, expansion_of, refs
from autopar.capture.decompose.subgraph import Ref, Subgraph, SubgraphOp
from autopar.ir.commit import Value
from autopar.ir.edit import Edit
from autopar.ir.layout import layout_of
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import is_getitem, operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import Requirement, TensorType, ValueType, requirement_of
from autopar.plan.boundary import required_dtypes
from autopar.search.problem.strategies import StepLayouts


def write(
    edit: Edit,
    program: Program,
    types: Mapping[fx.Node, ValueType],
    uses: Mapping[fx.Node, Sequence[Requirement | None]],
    inside: Mapping[fx.Node, Sequence[StepLayouts]],
    device: torch.device = CPU,
) -> None:
    """Give every value and every use of a program on a mesh its layout, and expand the ops of ``inside``.

    Args:
        device: of tensors that expansions create.
    """
    mesh = program.mesh
    assert mesh is not None
    new: dict[fx.Node, Value] = {}
    places: dict[tuple[Any, ...], Value] = {}
    gone: set[fx.Node] = set()
    for node in list(program.nodes):
        if node in inside:
            gone |= {node, *(user for user in node.users if is_getitem(user))}
            _expand(edit, node, mesh, inside[node], new, places, device)
    for node, type in types.items():
        if node not in gone:
            edit.annotate(node, type=type, uses=uses.get(node, ()))


def type_of(ref: Ref, expansion: Subgraph, operand_types: Sequence[TensorType]) -> TensorType:
    """Return the type of a value that a step of an expansion reads."""
    if ref.step < 0:
        return operand_types[-ref.step - 1]
    type = expansion.steps[ref.step].type
    part = type if ref.part is None else type[ref.part]  # type: ignore[index]
    assert isinstance(part, TensorType)
    return part


def operand_types(node: fx.Node) -> list[TensorType]:
    """Return the types of the operands of an op, in the dtypes that it requires."""
    read = [tensor_type(operand) for operand in operands(node)]
    dtypes = required_dtypes(record_of(node), read)
    return [replace(type, dtype=dtype, layout=None) for type, dtype in zip(read, dtypes, strict=True)]


def _expand(
    edit: Edit, node: fx.Node, mesh: Mesh, layouts: Sequence[StepLayouts], new: dict[fx.Node, Value],
    places: dict[tuple[Any, ...], Value], device: torch.device,
) -> None:  # fmt: skip
    expansion, read = expansion_of(node, device), operand_types(node)

    def insertion(k: int, step: SubgraphOp) -> Insertion:
        needs, gives = layouts[k]
        parts = step.type if isinstance(step.type, tuple) else (step.type,)
        made = tuple(
            None if part is None or give is None else replace(part, layout=layout_of(mesh, give))
            for part, give in zip(parts, gives, strict=True)
        )
        dtypes = [type_of(ref, expansion, read).dtype for ref in refs(step)]
        required = [requirement_of(mesh, need, dtype) for need, dtype in zip(needs, dtypes, strict=True)]
        return Insertion(made if isinstance(step.type, tuple) else made[0], required)

    expand(edit, node, expansion, new, places, insertion)
