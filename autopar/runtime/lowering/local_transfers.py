"""Write the transfers that send nothing: a rank computes its new piece from its old one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import operands, tensor_type
from autopar.ir.ops.seeded_random import folded
from autopar.runtime.lowering.body import Body
from autopar.runtime.lowering.collectives import flat_view, redistribute_locally
from autopar.runtime.lowering.packing import packing
from autopar.runtime.simulation.effects import pending_piece, place_along

Arguments = dict[str, Any]
Call = tuple[Callable[..., Any], tuple[Any, ...]]  # a function, and its arguments after the tensor


def write_local_transfer(body: Body, node: fx.Node) -> None:
    """Write a transfer that sends nothing."""
    x = body.operand(node)
    if node.target is transfers.wait:
        body.values[node] = x
        return
    arguments = transfers.arguments(node.target, node.args, node.kwargs)
    function, args = CALLS[node.target](body, node, arguments)
    body.values[node] = body.call(node, node.name, function, (x, *args))


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
    sizes, index = arguments["sizes"], body.program.coordinates_on(arguments.get("stage"))[arguments["axis"]]
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
