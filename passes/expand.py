"""Expand an op that needs a split dim whole into ops that do not need it whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.capture.decompose.expanded import ARANGE, CPU, Insertion, expand, expansion_of, refs
from autopar.capture.decompose.expansions import EXPANSIONS
from autopar.capture.decompose.subgraph import Ref, SubgraphOp
from autopar.ir.commit import Value
from autopar.ir.edit import Edit
from autopar.ir.layout import DistAttr, Layout, layout_of
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.passes.manager import LayoutPass


@dataclass(frozen=True)
class Expand(LayoutPass):
    """Write softmax, cross-entropy, look-ups and causal attention with ops that can be split, where their dim is split.

        table : f32[100/tp 64] = param                         table : f32[100/tp 64] = param
        y : f32[4 64] = embedding(table, ids)             →    places : i64[100] = arange(100)
                                                               y : f32[4 64] = autopar::look_up(table, ids, places, 100)

    A trial layout propagation, in which such ops may be split, finds these ops. Its Layouts are not kept.

    Attributes:
        mesh, constraints, strict, whole: as in ``LayoutPass``.
        device: the device of tensors that ops create; ``None``: the CPU.
    """

    name: ClassVar[str] = "expand"
    takes: ClassVar[str] = "traced"
    gives: ClassVar[str] = "traced"

    device: torch.device | None = None

    def run(self, program: Program) -> list[str]:
        self.expanded(program)
        return []

    def expanded(self, program: Program) -> dict[fx.Node, list[Value]]:
        """Expand the ops, and return each with the results of the steps of its expansion."""
        mesh, made = self._put_on_mesh(program), dict[fx.Node, list[Value]]()
        if not any(node.target in EXPANSIONS for node in program.nodes):
            return made
        trial = self._propagation(program, mesh, expanding=True)
        if trial.split:
            new: dict[fx.Node, Value] = {}
            places: dict[tuple[Any, ...], Value] = {}
            with program.edit() as edit:
                for node in list(program.nodes):  # in order, so that what is shared comes before all its readers
                    if (dim := trial.split.get(node)) is not None:
                        made[node] = self.expand(edit, node, layout_of(mesh, DistAttr((dim,))), new, places)
        return made

    def expand(
        self,
        edit: Edit,
        node: fx.Node,
        split: Layout,
        new: dict[fx.Node, Value],
        places: dict[tuple[Any, ...], Value] | None = None,
    ) -> list[Value]:
        """Put an op's expansion in its place.

        Args:
            split: the Layout of the tensor that numbers the indices along the dim. The ops that read it know which
                indices a rank has.
            new: old value → its replacement, which keeps the constraint of the old value.
            places: what numbers the indices of a dim, by its size, Layout and phase; ops of one phase share it.
        """
        expansion = expansion_of(node, self.device or CPU)
        needs = record_of(node).uses or (None,) * len(operands(node))

        def insertion(k: int, step: SubgraphOp) -> Insertion:
            type = step.type
            if step.target is ARANGE:
                assert isinstance(type, TensorType)
                type = replace(type, layout=split)
            if expansion.results == (Ref(k),) and (layout := self.layout(node, split.mesh)) is not None:
                assert isinstance(type, TensorType)
                type = replace(type, layout=layout)
            return Insertion(type, [needs[-ref.step - 1] if ref.step < 0 else None for ref in refs(step)])

        return expand(edit, node, expansion, new, {} if places is None else places, insertion)

    def layout(self, node: fx.Node, mesh: Mesh) -> Layout | None:
        type = record_of(node).type
        layout = type.layout if isinstance(type, TensorType) else None
        attr = self.constraints.get(node.name)
        return layout if attr is None else layout_of(mesh, attr)
