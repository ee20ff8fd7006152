"""Make a model's parameters DTensors, each with the layout that the plan gives it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from autopar.capture.model_state import model_state
from autopar.ir.dtensor import edge_of, placements_of
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.runtime.dtensors import is_dtensor, redistribute
from autopar.runtime.processes.job import Job
from autopar.torch_private import have_gradient_hooks, refer_weakly


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


def move_parameters(model: torch.nn.Module, attrs: Mapping[str, DistAttr], mesh: Mesh, job: Job) -> None:
    """Redistribute parameters to the layouts ``attrs``, and drop their gradients.

    They stay the same objects, so that an optimizer keeps them.
    """
    refer_weakly(model, False)
    try:
        for name, parameter in model_state(model).parameters:
            placements = placements_of(attrs[name], mesh, tuple(parameter.shape)) if name in attrs else None
            if placements is None:
                continue
            assert is_dtensor(parameter)
            if parameter.placements != placements:
                put_in_place(parameter, redistribute(parameter.detach(), placements))
    finally:
        refer_weakly(model, True)


def put_in_place(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Let a parameter be a DTensor on another mesh, or with other placements. It loses its gradient."""
    parameter.grad = None
    new = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
    vars(new).update(vars(parameter))
    torch.utils.swap_tensors(parameter, new)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's piece of a DTensor, without a graph; a plain tensor itself."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()
