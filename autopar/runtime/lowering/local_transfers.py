"""Write the transfers that send nothing: a rank computes its new piece from its old one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import operands, tensor_type
from autopar.ir.ops.seeded_random import folded
from autopar.ir.subaxes import index_along
from autopar.runtime.lowering.body import Body
from autopar.runtime.lowering.bucket_collectives import join_chunks, join_gathered_chunks
from autopar.runtime.lowering.collectives import flat_view, redistribute_locally
from autopar.runtime.lowering.packing import packing
from autopar.runtime.simulation.effects import pending_piece, place_along

Arguments = dict[str, Any]
Call = tuple[Callable[..., Any], tuple[Any, ...]]  # a function, and its arguments after the tensor


def write_local_transfer(body: Body, node: fx.Node) -> None:
    """Write a transfer that sends nothing."""
    if node.target is transfers.join_chunks:
        write_join(body, node)
        return
    x = body.operand(node)
    arguments = transfers.arguments(node.target, node.args, node.kwargs)
    function, args = CALLS[node.target](body, node, arguments)
    body.values[node] = body.call(node, node.name, function, (x, *args))


def write_join(body: Body, node: fx.Node) -> None:
    """Write the join of the chunks of a transfer."""
    arguments, shape = transfers.arguments(node.target, node.args, node.kwargs), tuple(tensor_type(node).shape)
    chunks = [body.values[chunk] for chunk in operands(node)]
    if arguments.get("dim") is None:
        body.values[node] = body.call(node, node.name, join_chunks, (chunks, shape))
    else:
        view, dim = gathered_view(arguments, shape, tensor_type(operands(node)[0]).shape[0]), arguments["dim"]
        body.values[node] = body.call(node, node.name, join_gathered_chunks, (chunks, view, dim, shape))
    body.fresh.add(node)


def gathered_view(arguments: Arguments, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the shape of the pieces that a gather concatenates, with merged dims split into their parts."""
    if arguments.get("parts"):
        return flat_view(arguments, ())
    return tuple(size // ranks if dim == arguments["dim"] else size for dim, size in enumerate(shape))


def _cast(body: Body, node: fx.Node, arguments: Arguments) -> Call:
    return torch.Tensor.to, (arguments["dtype"],)


def _fold_in(body: Body, node: fx.Node, arguments: Arguments) -> Call:
    stage = arguments.get("stage")
    return folded, (place_along(arguments, body.program.coordinates_on(stage), body.program.meshes[stage]),)


def _pend(body: Body, node: fx.Node, arguments: Arguments) -> Call:
    return pending_piece, (arguments, body.program.coordinates_on(arguments.get("stage")))


def _redistribute(body: Body, node: fx.Node, arguments: Arguments) -> Call:
    ends = transfers.Ends.of(arguments, body.program.meshes)
    return redistribute_locally, (packing(ends, body.program.rank, arguments.get("kept", ())),)


def _own_piece(body: Body, node: fx.Node, arguments: Arguments) -> Call:
    view, shape = flat_view(arguments, tensor_type(operands(node)[0]).shape), tensor_type(node).shape
    at = body.program.coordinates_on(arguments.get("stage"))
    sizes, index = arguments["sizes"], index_along(arguments["axis"], at)
    return own_piece, (view, arguments["dim"], sum(sizes[:index]), sizes[index], shape)


CALLS: dict[Any, Callable[[Body, fx.Node, Arguments], Call]] = {
    transfers.cast: _cast,
    transfers.fold_in: _fold_in,
    transfers.pend: _pend,
    transfers.redistribute: _redistribute,
    transfers.slice: _own_piece,
}


def own_piece(
    x: torch.Tensor, view: tuple[int, ...], dim: int, start: int, size: int, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return a rank's piece of a dim, in its own memory."""
    return x.reshape(view).narrow(dim, start, size).reshape(shape).contiguous()
