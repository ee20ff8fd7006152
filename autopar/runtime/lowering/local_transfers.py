"""Say what the transfers that send nothing call: a rank computes its new piece from its old one.

Generated code, simulated ranks and measured calls all run these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import operands, tensor_type
from autopar.ir.ops.seeded_random import folded
from autopar.ir.program import Program
from autopar.ir.subaxes import index_along
from autopar.runtime.lowering.bucket_collectives import join_chunks, join_gathered_chunks
from autopar.runtime.lowering.collectives import flat_view, redistribute_locally
from autopar.runtime.lowering.packing import packing
from autopar.runtime.simulation.effects import Arguments, RankPosition, pending_piece, place_along

Shape = Sequence[int]
Call = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]  # a function, and its arguments after the operand


def call_of(program: Program, node: fx.Node) -> Call:
    """Return the call of a local transfer of a rank's program."""
    arguments = transfers.arguments(node.target, node.args, node.kwargs)
    mesh = program.meshes[arguments.get("stage")]
    position = RankPosition(program.meshes, program.rank, mesh.coordinates(program.rank))
    return CALLS[node.target](arguments, position, tensor_type(operands(node)[0]).shape)


def _cast(arguments: Arguments, position: RankPosition, piece: Shape) -> Call:
    return torch.Tensor.to, (arguments["dtype"],)


def _fold_in(arguments: Arguments, position: RankPosition, piece: Shape) -> Call:
    return folded, (place_along(arguments, position.at, position.meshes[arguments.get("stage")]),)


def _pend(arguments: Arguments, position: RankPosition, piece: Shape) -> Call:
    return pending_piece, (arguments, position.at)


def _redistribute(arguments: Arguments, position: RankPosition, piece: Shape) -> Call:
    ends = transfers.Ends.of(arguments, position.meshes)
    return redistribute_locally, (packing(ends, position.rank, arguments.get("kept", ())),)


def _own_piece(arguments: Arguments, position: RankPosition, piece: Shape) -> Call:
    sizes, index = arguments["sizes"], index_along(arguments["axis"], position.at)
    shape = transfers.local_shape(transfers.slice, piece, arguments, position.at)
    return own_piece, (flat_view(arguments, piece), arguments["dim"], sum(sizes[:index]), sizes[index], shape)


def _join(arguments: Arguments, position: RankPosition, chunk: Shape) -> Call:
    shape, dim = tuple(arguments["shape"]), arguments.get("dim")
    if dim is None:
        return join_chunks, (shape,)
    pieces = tuple(size // chunk[0] if place == dim else size for place, size in enumerate(shape))
    return join_gathered_chunks, (flat_view(arguments, pieces), dim, shape)


# transfer → its call on a rank, from its arguments by name and the shape of the operand, or of a chunk that is joined
CALLS: dict[Any, Callable[[Arguments, RankPosition, Shape], Call]] = {
    transfers.cast: _cast,
    transfers.fold_in: _fold_in,
    transfers.pend: _pend,
    transfers.redistribute: _redistribute,  # only if nothing is sent
    transfers.slice: _own_piece,
    transfers.join_chunks: _join,
}


def own_piece(
    x: torch.Tensor, view: tuple[int, ...], dim: int, start: int, size: int, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return a rank's piece of a dim, in its own memory."""
    return x.reshape(view).narrow(dim, start, size).reshape(shape).contiguous()
