"""Choose the layouts of a stage of ZeRO: which values are sharded over the data axis, besides the batch.

ZeRO: Rajbhandari et al., SC 2020. With HSDP (the preset ``hsdp``) the data axis is the one that splits parameters.

| stage | sharded over dp | transfers |
| --- | --- | --- |
| 1 | the optimizer's state | a reduce-scatter of each gradient and an all-gather of each parameter, once a step |
| 2 | the sums of gradients, too | a reduce-scatter for each micro-batch |
| 3 | parameters, too | all-gathers in each forward and backward, and none in the update |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.plan.batch import batch_axes, split_over

STAGES: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset({"state"}),
    frozenset({"state", "gradient"}),
    frozenset({"state", "gradient", "parameter"}),
)

MOST_NAMES = 4  # of parameters in a note


@dataclass(frozen=True)
class Zero:
    """The parts of a step that a stage of ZeRO shards, and the axis of the mesh over which it shards them.

    Attributes:
        parts: the sharded ones of ``state``, ``gradient`` and ``parameter``.
    """

    parts: frozenset[str]
    mesh: Mesh
    axis: str

    def split(self, part: str, attr: DistAttr, shape: Sequence[int]) -> DistAttr:
        """Return the layout of a value of a part: ``attr``, sharded over the axis if the stage shards the part."""
        return split_over(attr, shape, self.mesh, self.axis) if part in self.parts else attr


def about_whole(zero: Zero, states: Mapping[str, DistAttr]) -> tuple[str, ...]:
    """Return a note about parameters that ZeRO leaves whole, because they are too small for the axis.

    Args:
        states: parameter → the layout of its optimizer's state.
    """
    if not zero.parts or zero.mesh.sizes[zero.axis] == 1:
        return ()
    whole = [name for name, attr in states.items() if zero.axis not in attr.axes]
    if not whole:
        return ()
    shown = ", ".join(whole[:MOST_NAMES]) + (", …" if len(whole) > MOST_NAMES else "")
    ranks = zero.mesh.sizes[zero.axis]
    return (
        f"ZeRO leaves {len(whole)} of {len(states)} parameters whole over {zero.axis}, whose {ranks:,} ranks are more "
        f"than any of their free dims has elements: {shown}",
    )


def zero_of(stage: int, mesh: Mesh, inputs: Mapping[str, DistAttr], preferred: str | None = None) -> Zero:
    """Return a stage of ZeRO on a mesh; ``ValueError`` if no axis shards the batch.

    Args:
        inputs: their layouts.
        preferred: the axis over which a plan shards parameters.
    """
    return Zero(STAGES[stage], mesh, data_axis(mesh, inputs, preferred) if STAGES[stage] else "")


def data_axis(mesh: Mesh, inputs: Mapping[str, DistAttr], preferred: str | None = None) -> str:
    """Return the axis over which ZeRO shards: ``preferred``, or the first axis, that shards dim 0 of an input.

    If each axis of the batch has one rank, it is the first of them, and nothing is sharded.

    Raises:
        ValueError: no axis shards an input.
    """
    split = {axis for attr in inputs.values() for dim in attr.dims[:1] for _, axes in dim for axis in axes}
    for axis in (preferred, *mesh.names):
        if axis in split:
            return axis
    axes_of_batch = batch_axes(mesh)
    if axes_of_batch and all(mesh.sizes[axis] == 1 for axis in axes_of_batch):
        return axes_of_batch[0]
    raise ValueError(
        f"zero= splits what an axis of the batch replicates, but no axis of the mesh "
        f"({mesh if mesh.names else 'of one rank, of a stage'}) splits an input; use "
        f"zero=0, or split the batch"
    )
