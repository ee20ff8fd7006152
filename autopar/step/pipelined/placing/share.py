"""Make the program after the micro-batches, in which all stages get what one has made: outputs, written buffers.

outputs_0 : f32[2 8 10] @s1 = input('.outputs.0')         the logits of two micro-batches, made by stage 1
running_mean : f32[4] @s0 = buffer                        what stage 0 has written, and stage 1 keeps, too
running_mean_1 : f32[4] @s1 = state(running_mean_s1_s1, 'running_mean')
forward:
  outputs_0_mesh : f32[2 8 10] @s1 = send(outputs_0, None)
  outputs_0_mesh_mesh : f32[2 8 10] = recv(outputs_0_mesh, None, splits=((), (), ()))
  …
  return (outputs_0_mesh_mesh,)

``None`` is the whole mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import fx

from autopar.ir.layout import DistAttr, layout_of
from autopar.ir.mesh import Mesh, stage_name
from autopar.ir.record import Record, TensorType
from autopar.ir.value_names import stacked_name
from autopar.step.compiling.graph_builder import GraphBuilder
from autopar.step.pipelined.placing.on_stages import Traced
from autopar.step.pipelined.placing.programs import CutStage, written_buffers


class StageOutput(NamedTuple):
    """One output.

    Attributes:
        stage: the stage that makes it.
        name: its name there.
        type: its type there.
    """

    stage: int
    name: str
    type: TensorType

    def on(self, mesh: Mesh, whole: bool) -> TensorType:
        """Return its type on the ranks of a position along the pipeline. ``whole``: each rank gets all of it."""
        attr = DistAttr.replicated(len(self.type.shape)) if whole else self.type.attr
        return replace(self.type, layout=layout_of(mesh, attr))

    def stacked(self, count: int) -> TensorType:
        """Return the type of the outputs of so many micro-batches as one value, with a new first dim."""
        (first,), attr = DistAttr.replicated(1).dims, self.type.attr
        layout = layout_of(self.type.placed.mesh, replace(attr, dims=(first, *attr.dims)))
        return replace(self.type, shape=(count, *self.type.shape), layout=layout)


def outputs_of_stages(stages: Iterable[CutStage]) -> tuple[StageOutput, ...]:
    """Return the outputs of all stages, in the order in which the whole program returns them."""
    outputs = {
        position: StageOutput(stage.number, *stage.interface.returned[k])
        for stage in stages
        for position, k in stage.cut.outputs.items()
    }
    return tuple(outputs[position] for position in sorted(outputs))


def traced_share(
    stages: Sequence[CutStage], outputs: Mapping[int, StageOutput], count: int, device: torch.device
) -> Traced | None:
    """Make the traced program; ``None`` if no stage has anything for the others.

    Args:
        stages: those whose written buffers are shared.
        outputs: number → the output.
        count: the number of micro-batches, whose outputs are stacked.
    """
    making = _Share(device)
    returned = [making.output(k, output, count) for k, output in outputs.items()]
    first = {stage.mesh: stage for stage in reversed(stages)}  # position along the pipeline → its first stage
    for stage, name in written_buffers(stages):
        making.buffer(stage, name, [other for mesh, other in first.items() if mesh != stage.mesh])
    if not returned and not making.states:
        return None
    return Traced(making.builder.program(returned, making.states), making.constraints, making.stages)


@dataclass
class _Share:
    """Builds the program."""

    device: torch.device

    def __post_init__(self) -> None:
        self.builder = GraphBuilder(self.device)
        self.builder.phase = "update"
        self.constraints: dict[str, DistAttr] = {}
        self.stages: dict[str, str] = {}
        self.states: dict[fx.Node, fx.Node] = {}

    def output(self, number: int, output: StageOutput, count: int) -> fx.Node:
        return self._placeholder(stacked_name(number), output.stacked(count), "input", output.stage)

    def buffer(self, stage: CutStage, name: str, others: Sequence[CutStage]) -> None:
        """Let the other positions take a buffer that a stage has written."""
        type = stage.types[name]
        written = self._placeholder(name, type, "buffer", stage.number) if others else None
        for other in others:
            assert written is not None
            self.states[self._placeholder(name, type, "state", other.number)] = written

    def _placeholder(self, name: str, type: TensorType, role: str, stage: int) -> fx.Node:
        node = self.builder.placeholder(name, Record(TensorType(type.shape, type.dtype), role=role, name=name))
        self.constraints[node.name], self.stages[node.name] = type.attr, stage_name(stage)
        return node
