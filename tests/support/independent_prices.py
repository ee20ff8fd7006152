"""Price explicit programs by other models than autopar's: ops by torch's counter of flops, collectives as rings.

Nothing here uses ``autopar.costs``: neither rules with work, nor messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import _collective_utils as dtensor
from torch.utils.flop_counter import flop_registry

from autopar import Mesh, Program
from autopar.ir import transfers
from autopar.ir.nodes import element_type, is_getitem, operands, record_of
from autopar.ir.record import TensorType

FLOPS, MEMORY, KERNEL = 400e12, 2.5e12, 2e-6  # of a device: flop/s, bytes/s, seconds a kernel
NODE = 8  # ranks that have fast links between them; the last axes of a mesh are the nearest
BANDWIDTH, LATENCY = {True: 300e9, False: 40e9}, {True: 3e-6, False: 8e-6}  # inside a node, between nodes
VIEWS = ("view", "t", "transpose", "expand", "unsqueeze", "squeeze", "permute", "slice", "select", "split", "detach")

Collective = Callable[[Mesh, str, str, float, float], float]  # mesh, transfer, axis, bytes before and after → seconds


def piece(type: TensorType) -> list[int]:
    """The shape of the largest piece."""
    if type.layout is None:
        return list(type.shape)
    mesh, shape = type.layout.mesh, []
    for size, dim in zip(type.shape, type.layout.attr.dims, strict=True):
        shape.append(
            math.prod(math.ceil((part or size) / math.prod(mesh.sizes[a] for a in axes)) for part, axes in dim)
        )
    return shape


def size(type: TensorType) -> int:
    return math.prod(piece(type)) * type.dtype.itemsize


def inside(mesh: Mesh, axis: str) -> bool:
    """Whether ranks along an axis are in one node."""
    return math.prod(mesh.sizes[name] for name in mesh.names[mesh.names.index(axis) :]) <= NODE


def ring(mesh: Mesh, transfer: str, axis: str, before: float, after: float) -> float:
    """The seconds of a plain ring: each step sends one of n chunks to the next rank."""
    n, near = mesh.sizes[axis], inside(mesh, axis)
    chunk = {"all_gather": after / n, "reduce_scatter": before / n, "all_reduce": before / n}.get(transfer, before / n)
    steps = (n - 1) * (2 if transfer == "all_reduce" else 1)
    return steps * (LATENCY[near] + chunk / BANDWIDTH[near])


def of_dtensor(mesh: Mesh, transfer: str, axis: str, before: float, after: float) -> float:
    """The seconds by the formulas of DTensor's planner, with its own figures. Tried on torch 2.13."""
    n, near = mesh.sizes[axis], inside(mesh, axis)
    topology = dtensor.MeshTopoInfo(None, [n], [87.7 * (1 if near else 0.22)], [0.6 if near else 2.7])  # type: ignore[arg-type]
    if transfer == "all_gather":
        return dtensor.allgather_cost(after / 1e9, topology, 0) / 1e6
    if transfer == "all_reduce":
        return dtensor.allreduce_cost(before / 1e9, topology, 0) / 1e6
    if transfer == "reduce_scatter":
        return dtensor.reduce_scatter_cost(before / 1e9, topology, 0) / 1e6
    return dtensor.allgather_cost(before / 1e9, topology, 0) / 1e6 + 1e-6  # its price of an all-to-all


def flops(node: torch.fx.Node, reads: list[TensorType], made: TensorType) -> float:
    """The flops of an op by torch's registry; 0 for ops that it does not count."""
    packet = getattr(node.target, "overloadpacket", None)
    count: Any = flop_registry.get(packet)
    if count is None:
        return 0.0
    shapes = iter([torch.empty(piece(type), device="meta") for type in reads])
    args = torch.fx.node.map_aggregate(node.args, lambda arg: next(shapes) if isinstance(arg, torch.fx.Node) else arg)
    return float(count(*args, out_val=torch.empty(piece(made), device="meta")))


def seconds(program: Program, collective: Collective) -> float:
    """The seconds of an explicit program, one op after the other."""
    total = 0.0
    for node in program.nodes:
        if node.op != "call_function" or is_getitem(node):
            continue
        record = record_of(node)
        made = [
            type for type in (record.type if isinstance(record.type, tuple) else (record.type,)) if type is not None
        ]
        reads = [element_type(each) if is_getitem(each) else record_of(each).type for each in operands(node)]
        transfer = transfers.BY_FUNCTION.get(node.target)
        if transfer is not None and transfer.collective:
            arguments = transfers.arguments(node.target, node.args, node.kwargs)
            axes = transfers.axes_along(node.target, reads[0], arguments, made[0])
            total += sum(collective(program.mesh, transfer.name, axis, size(reads[0]), size(made[0])) for axis in axes)
        elif str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.") not in VIEWS:
            moved = sum(map(size, reads)) + sum(map(size, made))
            total += KERNEL + max(flops(node, reads, made[0]) / FLOPS, moved / MEMORY)
    return total
