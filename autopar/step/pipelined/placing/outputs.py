"""Say which stage makes each output of a program that was cut, and how the outputs go to the ranks of all stages.

stage 1 on ranks 2 3                             ranks 0 1                      ranks 2 3
logits : f32[8/dp 10]                     →      f32[8/dp 10]                   f32[8/dp 10]
logits : f32[8/dp 10], outputs="global"   →      f32[8 10]                      f32[8 10]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopar.ir.layout import DistAttr, layout_of
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.runtime.lowering.bundles import Crossed
from autopar.step.pipelined.placing.programs import CutStage


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

    def stacked(self, count: int) -> StageOutput:
        """Return the outputs of so many micro-batches as one value, with a new first dim."""
        (first,), attr = DistAttr.replicated(1).dims, self.type.attr
        layout = layout_of(self.type.placed.mesh, replace(attr, dims=(first, *attr.dims)))
        return self._replace(type=replace(self.type, shape=(count, *self.type.shape), layout=layout))


def outputs_of_stages(stages: Iterable[CutStage]) -> tuple[StageOutput, ...]:
    """Return the outputs of all stages, in the order in which the whole program returns them."""
    outputs = {
        position: StageOutput(stage.number, *stage.interface.returned[k])
        for stage in stages
        for position, k in stage.cut.outputs.items()
    }
    return tuple(outputs[position] for position in sorted(outputs))


def to_all_ranks(outputs: Sequence[StageOutput], stages: Iterable[CutStage], whole: bool) -> list[Crossed]:
    """Return the outputs as they go to each position along the pipeline, output by output."""
    positions = dict.fromkeys(stage.mesh for stage in stages)
    return [Crossed.of(output.name, output.type, output.on(mesh, whole)) for output in outputs for mesh in positions]
