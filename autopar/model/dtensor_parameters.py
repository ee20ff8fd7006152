"""Make a model's parameters DTensors, each with the layout that the plan gives it, and move them.

A home is a Layout: the mesh of one stage's ranks, or the whole mesh, and the distributed attribute there. A parameter
is a DTensor on torch's mesh of these ranks. The other ranks have the same DTensor with an empty piece, as torch's
``distribute_tensor`` has it on ranks outside of a mesh, so names, shapes and groups are complete on each rank.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from autopar.capture.model_state import model_state
from autopar.ir.dtensor import attr_of, edge_of, layout_of_dtensor, mesh_of, placements_of
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.transfers import Ends
from autopar.runtime.dtensors import dtensor_of_piece, is_dtensor, redistribute
from autopar.runtime.lowering.packing import packing
from autopar.runtime.lowering.point_to_point import exchange_between_stages
from autopar.runtime.processes.job import Job
from autopar.torch_private import have_gradient_hooks, refer_weakly

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def sharded(model: torch.nn.Module, attrs: Mapping[str, DistAttr], mesh: Mesh, job: Job) -> torch.nn.Module:
    """Copy the model with DTensor parameters; the model itself does not change.

    The values are those of the first rank, as in DistributedDataParallel, so that ranks with other seeds agree. Buffers
    that the plan does not shard stay plain tensors, replicated on every rank. For a model on meta nothing is sent, and
    the copy is on meta.

    Args:
        attrs: parameter or buffer → its layout; others are replicated.

    Raises:
        ValueError: a parameter has a gradient hook, which a copy does not have.
    """
    state = model_state(model)
    for name, parameter in state.parameters:
        if have_gradient_hooks([parameter]):
            raise ValueError(
                f"{name} has a hook of its gradient, and the parameters on processes are copies without it: remove it, "
                f"and register it on the parameter of that name in what parallelize returns"
            )
    replaced: dict[int, Any] = {}
    for name, tensor in (*state.parameters, *state.buffers):
        attr = edge_of(attrs.get(name, DistAttr.replicated(tensor.dim())), mesh, tensor.shape, strided=True)
        placed = _placed(tensor, attr, mesh, job)
        if isinstance(tensor, torch.nn.Parameter):
            new: torch.Tensor = torch.nn.Parameter(placed, requires_grad=tensor.requires_grad)
        else:
            new = placed.to_local() if attr.is_replicated else placed
        vars(new).update({key: value for key, value in vars(tensor).items() if key not in vars(new)})
        replaced[id(tensor)] = new
    return copy.deepcopy(model, replaced)


def _placed(tensor: torch.Tensor, attr: DistAttr, mesh: Mesh, job: Job) -> Any:
    from torch.distributed.tensor import distribute_tensor

    placements = placements_of(attr, mesh, tensor.shape)
    value = tensor.detach()
    if not value.is_meta:
        # a replicated tensor is not sent to its own rank, and would share the model's memory
        value = value.to(job.device).contiguous().clone()
    return distribute_tensor(value, job.device_mesh, placements)


def move_parameters(module: torch.nn.Module, homes: Mapping[str, Layout], job: Job | None) -> None:
    """Move parameters to their homes, and drop the gradients of those that move. All ranks call it alike.

    They stay the same objects, so that an optimizer keeps them. Each rank sends and receives only what another rank
    lacks, one parameter after the other. In a process that is alone nothing moves.

    Args:
        homes: parameter → its home: on one stage, or on the whole mesh. Others stay where they are.
    """
    if job is None:
        return
    device_meshes = job.device_meshes(home.mesh for home in homes.values())
    refer_weakly(module, False)
    try:
        for name, parameter in model_state(module).parameters:
            if name not in homes:
                continue
            assert is_dtensor(parameter)
            home = homes[name]
            device_mesh = device_meshes[home.mesh]
            placements = placements_of(home.attr, home.mesh, tuple(parameter.shape))
            if parameter.device_mesh == device_mesh and parameter.placements == placements:
                continue
            _put_in_place(parameter, placed_on(parameter.detach(), device_mesh, placements, job))
    finally:
        refer_weakly(module, True)


def _put_in_place(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Let a parameter be a DTensor on another mesh, or with other placements. It loses its gradient."""
    parameter.grad = None
    new = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
    vars(new).update(vars(parameter))
    torch.utils.swap_tensors(parameter, new)


def placed_on(value: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Any], job: Job) -> Any:
    """Return a tensor as a DTensor with these placements on the mesh of a stage, or on the whole mesh.

    All ranks call it, one value after the other. On ranks outside of the mesh its piece is empty.

    Args:
        value: a DTensor on any mesh; or a full tensor, of which the first rank's values are taken.
    """
    if is_dtensor(value) and value.device_mesh == device_mesh:
        return value if value.placements == tuple(placements) else redistribute(value, placements)
    shape = tuple(value.shape)
    mesh = mesh_of(device_mesh)
    target = Layout(mesh, attr_of(placements, mesh, shape))
    piece = _piece(value, target, job)
    stride = torch.empty(shape, device="meta").stride()
    return dtensor_of_piece(piece, device_mesh, placements, shape, stride)


def is_on_a_stage(value: torch.Tensor, job: Job) -> bool:
    """Return whether a tensor is a DTensor on the mesh of some of the ranks."""
    return is_dtensor(value) and value.device_mesh.size() < job.device_mesh.size()


def holds_part_of(value: torch.Tensor) -> bool:
    """Return whether this rank has a piece of a tensor: it is no DTensor, or the rank is on its mesh."""
    return not is_dtensor(value) or value.device_mesh.get_coordinate() is not None


def _piece(value: torch.Tensor, target: Layout, job: Job) -> torch.Tensor:
    """Return this rank's piece of a value in a Layout on another mesh; an empty tensor where it has none."""
    shape, device = tuple(value.shape), torch.device("meta") if value.is_meta else job.device
    if is_dtensor(value):
        value = _expressible(value)
        assert is_dtensor(value)
        source = layout_of_dtensor(value)
    else:
        first = Mesh(rank=1, ranks=job.device_mesh.mesh.flatten()[:1].tolist())
        source = Layout(first, DistAttr.replicated(len(shape)))
    plan = packing(Ends(shape, source, target), job.rank)
    piece = None
    if value.is_meta:
        piece = None if plan.shape is None else torch.empty(plan.shape, dtype=value.dtype, device=device)
    elif job.rank in source.mesh or job.rank in target.mesh:
        old = local_of(value).to(device) if job.rank in source.mesh else None
        piece = exchange_between_stages(old, plan, value.dtype, device)
    if plan.shape is None or piece is None:
        return torch.zeros(0 if shape else (), dtype=value.dtype, device=device)
    return piece


def _expressible(value: Any) -> Any:
    """Return a DTensor whose placements have a Layout, with nothing pending."""
    from torch.distributed.tensor import Replicate

    try:
        if not layout_of_dtensor(value).attr.pending:
            return value
    except ValueError:  # such as FSDP over tensor parallelism that splits a dim unevenly
        pass
    return redistribute(value.detach(), [Replicate()] * value.device_mesh.ndim)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's piece of a DTensor, without a graph; a plain tensor itself."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()
