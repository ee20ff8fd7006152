"""Fit state dicts to a model whose parameters are DTensors, and make state dicts that checkpoints can save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.model.dtensor_parameters import is_dtensor
from autopar.model.stage_parameters import is_on_a_stage, placed_on
from autopar.runtime.dtensors import full_tensor, redistribute
from autopar.runtime.processes.job import Job
from autopar.torch_private import is_strided_shard


def with_public_placements(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict whose DTensors have public placements only, which checkpoints can save.

    The others are redistributed, in place of the entry.
    """
    from torch.distributed.tensor import Replicate

    for name, value in state.items():
        if is_dtensor(value) and any(map(is_strided_shard, value.placements)):
            public = [Replicate() if is_strided_shard(p) else p for p in value.placements]
            state[name] = redistribute(value.detach(), public)
    return state


def fitted_to(state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], job: Job | None) -> dict[str, Any]:
    """Return a state dict whose values have the placements of the model's tensors. All ranks call it.

    Each rank gets its piece of the first rank's full tensor, as in ``sharded``; a DTensor is redistributed, from
    whatever mesh or stage it is on. A value that does not fit stays as it is, so that ``load_state_dict`` reports it.
    """
    from torch.distributed.tensor import Replicate, distribute_tensor

    fitted = dict(state)
    for name, target in tensors.items():  # in the order of the model, which all ranks share
        value = state.get(name)
        if job is None or not isinstance(value, torch.Tensor) or value.shape != target.shape:
            continue
        device_mesh = target.device_mesh if is_dtensor(target) else job.device_mesh
        placements = target.placements if is_dtensor(target) else [Replicate()] * device_mesh.ndim
        if is_dtensor(value) and value.device_mesh == device_mesh:
            value = redistribute(value.detach().to(job.device), placements)
        elif is_on_a_stage(target, job) or is_on_a_stage(value, job):
            value = placed_on(value.detach(), device_mesh, placements, job)
        else:
            value = full_tensor(value) if is_dtensor(value) else value  # on another mesh
            value = distribute_tensor(value.detach().to(target.device), job.device_mesh, placements)
        fitted[name] = value if is_dtensor(target) else value.to_local()
    return fitted
