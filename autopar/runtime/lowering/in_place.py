"""Write sums of gradients and updates of parameters that overwrite tensors of the caller (``donated``)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import fx

from autopar.ir.nodes import called_op, map_operands, operands, tensor_type
from autopar.optimizers import IN_PLACE, OFFLOADED
from autopar.runtime.lowering.body import Body
from autopar.scheduling.programs.donated import ADDING, Donated, overwritten, updated_together
from autopar.torch_private import aten


def adds_product(body: Body, donated: Donated, node: fx.Node) -> bool:
    """Return whether a product is added to a sum as it is computed. A search for NaN looks at the product itself."""
    return node in donated.products and body.hunt is None


def write_sum(body: Body, donated: Donated, node: fx.Node) -> None:
    """Add a gradient to its sum in place. The first gradient becomes the sum itself, if no other value shares its
    memory."""
    sum, addend = donated.sums[node], operands(node)[1]
    if adds_product(body, donated, addend):
        factors = map_operands(addend.args, body.values.__getitem__)
        call = body.call(addend, node.name, ADDING[called_op(addend)], (body.values[sum], *factors))  # errors quote it
        body.values[node] = call
        return
    value, dtype = body.values[addend], tensor_type(node).dtype
    if sum not in donated.zeros:
        value = body.call(node, node.name, aten.add_.Tensor, (body.values[sum], value))
    elif not body.is_last_of(addend) or tensor_type(addend).dtype != dtype:
        value = body.call(node, node.name, own_copy, (value, dtype))
    body.values[node] = value


def write_overwritten(body: Body, node: fx.Node) -> None:
    """Map the result of an update to the old value, which the update overwrites."""
    body.values[node] = body.values[overwritten(node)]


def write_updates(body: Body, donated: Donated, nodes: Sequence[fx.Node]) -> None:
    """Update several parameters with one op; the new values are in the memory of the old ones."""
    first = nodes[0]
    columns, shared_arguments = updated_together(nodes)
    parameters, gradients, *states = map_operands(columns, body.values.__getitem__)
    shared, numbers = map_operands((shared_arguments, dict(first.kwargs)), body.values.__getitem__)
    update = (OFFLOADED if donated.offloaded else IN_PLACE)[called_op(first)]
    call = body.call(first, f"{first.name}_in_place", update, (parameters, gradients, states, *shared), numbers)
    body.writers |= dict.fromkeys(itertools.chain(parameters, *states), call)
    if body.hunt is not None:
        names = [node.name for node in nodes]
        body.graph.call_function(body.look_at_updates, (names, gradients, [parameters, *states]))


def own_copy(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copy a tensor to memory of its own."""
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)
