"""Spread: give each value of a program its stage of a pipeline. Before, it was placed as if one stage had all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from torch import fx

from autopar.ir.layout import layout_of
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.nodes import operands, record_of
from autopar.ir.ops.over_stages import OVER_STAGES
from autopar.ir.program import Program
from autopar.ir.record import Record, Requirement, TensorType, ValueType
from autopar.passes.manager import Pass
from autopar.torch_private import inputs_of


class OnStages(NamedTuple):
    """Where the values of a program are.

    Attributes:
        mesh: the whole mesh.
        stages: name → the mesh of a stage.
        of: placeholder → its stage; the others are on the whole mesh.
    """

    mesh: Mesh
    stages: Mapping[str, Mesh]
    of: Mapping[str, str]


@dataclass(frozen=True)
class Spread(Pass):
    """Give each value its stage, so that reshard inserts the messages between stages.

        program placed on dp=2                              program placed on pp=2 dp=2
                                                            stage s0 on dp=2
                                                            stage s1 on dp=2 ranks 2 3
          a : f32[4] +dp = buffer                             a : f32[4] +dp @s0 = buffer
          b : f32[4] +dp = buffer                             b : f32[4] +dp @s1 = buffer
        update:                                        →    update:
          c : f32[4] = add.Tensor(a as [4], b as [4])         c : f32[4] @s0 = add.Tensor(a as [4] @s0, b as [4] @s0)

    An op is on the stage of its first operand that is on one, or else on the whole mesh. A value of the whole mesh is
    the same on all stages, so each stage reads it where it is. The exception is ``over_stages``: it reads each number
    on its stage, and its result, on the whole mesh, is pending over the stages until it is reduced.
    """

    name: ClassVar[str] = "spread"
    takes: ClassVar[str] = "placed"
    gives: ClassVar[str] = "placed"

    on: OnStages = field(default_factory=lambda: OnStages(Mesh({PIPELINE: 1}), {}, {}))

    def run(self, program: Program) -> None:
        whole, stages, of = self.on
        at: dict[fx.Node, Mesh] = {}
        with program.edit() as edit:
            for node in program.nodes:
                at[node] = stages[of[node.name]] if node.name in of else self._mesh(node, at)
                record = record_of(node)
                uses = self._uses(program, node, record, at)
                edit.annotate(node, type=_on(record.type, at[node], node.target is OVER_STAGES), uses=uses)
        program.mesh, program.stages = whole, dict(stages)

    def _mesh(self, node: fx.Node, at: Mapping[fx.Node, Mesh]) -> Mesh:
        """Return the mesh of an op."""
        whole = self.on.mesh
        if node.target is OVER_STAGES:
            return whole
        return next((at[value] for value in operands(node) if at[value] is not whole), whole)

    def _uses(
        self, program: Program, node: fx.Node, record: Record, at: Mapping[fx.Node, Mesh]
    ) -> tuple[Requirement | None, ...]:
        """Return the requirements of a node, each on the mesh on which the node reads the operand."""
        whole, values = self.on.mesh, inputs_of(node)
        if len(values) != len(record.uses):  # an operand is read twice
            values = operands(node)[: len(record.uses)]
        if node is program.output:
            homes = {own.name: at[own] for own in program.placeholders}
            meshes = [homes.get(result.of, whole) for result in record.results]
        else:
            meshes = [at[value] if at[value] is whole or at[node] is whole else at[node] for value in values]
        pairs = zip(record.uses, meshes, strict=True) if record.uses else ()
        return tuple(
            need if need is None or need.layout is None else replace(need, layout=layout_of(mesh, need.layout.attr))
            for need, mesh in pairs
        )


def _on(type: ValueType, mesh: Mesh, pending: bool) -> ValueType:
    """Return a type on a mesh; ``pending``: over its stages, too."""
    if isinstance(type, tuple):
        return tuple(None if part is None else _part(part, mesh, pending) for part in type)
    return None if type is None else _part(type, mesh, pending)


def _part(type: TensorType, mesh: Mesh, pending: bool) -> TensorType:
    if type.layout is None:
        return type
    attr = type.layout.attr
    if pending:
        attr = replace(attr, pending=tuple(sorted((*attr.pending, (PIPELINE, "sum")))))
    return replace(type, layout=layout_of(mesh, attr))
