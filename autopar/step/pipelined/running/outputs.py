"""Give the outputs of all micro-batches to the ranks of all stages, and join them into the outputs of the batch.

micro-batch 0 on stage 1, logits : f32[8 10]
micro-batch 1 on stage 1, logits : f32[8 10]      →      stages 0 and 1, stacked : f32[2 8 10]      →      f32[16 10]
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import torch

from autopar.errors import SimulationError
from autopar.model.local_tensors import LocalTensors
from autopar.runtime.simulation.pieces import join
from autopar.step.compiling.outputs import join_pieces, join_whole
from autopar.step.pipelined.placing.bundles import Bundle
from autopar.step.pipelined.placing.outputs import StageOutput, outputs_of_stages, to_all_ranks
from autopar.step.pipelined.placing.programs import CutStage, PipelinedMicro
from autopar.step.pipelined.running.exchange import Move, exchange
from autopar.step.pipelined.running.messages import Messages
from autopar.step.pipelined.running.stage_state import Tensors

Shared = tuple[StageOutput, Bundle]  # an output, and a rank's part of it on the way to one position


def outputs_to_share(micro: PipelinedMicro, rank: int) -> list[Shared]:
    """Return a rank's part of all outputs on their way to all positions along the pipeline."""
    stages, count = micro.stages, micro.schedule.batches
    return [
        (output, Bundle([value], rank))
        for output in outputs_of_stages(stages)
        for value in to_all_ranks([output.stacked(count)], stages, micro.whole)
    ]


def share_outputs(
    rank: int, made: Mapping[int, Sequence[Tensors]], outputs: Sequence[Shared], messages: Messages, first: int
) -> Generator[Any, Any, list[torch.Tensor]]:
    """Send the outputs to the ranks of all stages. Returns this rank's pieces, with a first dim of the micro-batches.

    Args:
        made: stage of this rank → for each micro-batch its outputs, by name.
        first: as of ``exchange``.
    """
    stacked = {
        (stage, name): torch.stack([of_batch[name] for of_batch in of_stage])
        for stage, of_stage in made.items()
        for name in of_stage[0]
    }
    moves: list[Move] = []
    for output, bundle in outputs:
        piece = stacked.get((output.stage, output.name))
        moves.append((bundle, [] if piece is None else [piece]))
    received = yield from exchange(rank, moves, messages, first, "the outputs")
    return [pieces[0] for pieces in received if pieces]


def join_here(
    micro: PipelinedMicro, stacked: Sequence[torch.Tensor], rank: int, tensors: LocalTensors, brought: int
) -> list[torch.Tensor]:
    """Join this rank's pieces of the outputs of all micro-batches. All ranks call it.

    Args:
        stacked: what ``share_outputs`` returns.
        tensors, brought: as of ``join_pieces``.
    """
    own = next(stage.mesh for stage in micro.stages if rank in stage.mesh)
    types = [output.on(own, micro.whole) for output in outputs_of_stages(micro.stages)]
    return [
        join_pieces(output, pieces.unbind(0), type, tensors, brought)
        for output, type, pieces in zip(micro.outputs, types, stacked, strict=True)
    ]


def join_simulated(micro: PipelinedMicro, stacked: Mapping[int, Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Join the outputs of all micro-batches of all simulated ranks. ``stacked``: rank → as of ``join_here``."""
    outputs = [output.stacked(micro.schedule.batches) for output in outputs_of_stages(micro.stages)]
    whole = whole_outputs(outputs, stacked, micro.stages, micro.whole)
    return [join_whole(output, value.unbind(0)) for output, value in zip(micro.outputs, whole, strict=True)]


def whole_outputs(
    outputs: Sequence[StageOutput],
    pieces: Mapping[int, Sequence[torch.Tensor]],
    stages: Iterable[CutStage],
    whole: bool,
) -> list[torch.Tensor]:
    """Return the outputs of simulated ranks. The ranks of each position along the pipeline have all of them.

    Raises:
        SimulationError: two positions have other values.
    """
    meshes = dict.fromkeys(stage.mesh for stage in stages)
    found = []
    for k, output in enumerate(outputs):
        first, *others = [
            join({rank: pieces[rank][k] for rank in mesh.ranks}, output.on(mesh, whole), output.name) for mesh in meshes
        ]
        if not all(torch.equal(other.nan_to_num(), first.nan_to_num()) for other in others):
            raise SimulationError(f"the ranks of all stages have the output {output.name}, and their values differ")
        found.append(first)
    return found
