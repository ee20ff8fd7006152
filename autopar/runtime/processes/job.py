"""The job: the processes of a mesh, one a rank, and this one among them."""

from __future__ import annotations

import datetime
import itertools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from autopar.ir.dtensor import device_mesh_of
from autopar.ir.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from autopar.runtime.processes.watch import Watch

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets


@dataclass(frozen=True)
class Job:
    """This process on the mesh.

    Attributes:
        rank: of this process, on the mesh and in the world.
        device_mesh: torch's mesh of the same ranks and names, with a process group for each axis.
        groups: ranks, in ascending order → the name of their group, for each axis, and several as one.
        device: where this rank's pieces lie.
        control: a gloo group of all ranks, for what is said beside the step.
    """

    rank: int
    device_mesh: DeviceMesh
    groups: dict[tuple[int, ...], str]
    device: torch.device
    control: distributed.ProcessGroup


def job_of(mesh: Mesh, device: torch.device, device_mesh: DeviceMesh | None, timeout: float) -> Job | None:
    """The job that this process belongs to; ``None`` where it is alone. All ranks call it.

    Where torchrun has started the process and no process group has been initialised, that is done here.

    Raises:
        ValueError: the mesh does not have as many ranks as there are processes.
    """
    if not distributed.is_available():
        return None
    if not distributed.is_initialized():
        if not all(os.environ.get(name) for name in LAUNCHED):
            return None
        _check_size(mesh, int(os.environ["WORLD_SIZE"]))
        _initialize(device, timeout)
    _check_size(mesh, distributed.get_world_size())
    if not _worlds or _worlds[0].group is not distributed.group.WORLD:
        _worlds[:] = [_World(distributed.group.WORLD, _watched(timeout))]
    key = (mesh, device.type, device_mesh)
    if key not in _worlds[0].jobs:
        _worlds[0].jobs[key] = _join(mesh, device, device_mesh)
    return _worlds[0].jobs[key]


@dataclass
class _World:
    """What was made in one initialisation of the processes: models on one mesh share its groups, each of which has threads
    and sockets, and one watch, with the time-out of the first."""

    group: distributed.ProcessGroup | None
    watch: Watch | None
    jobs: dict[Any, Job] = field(default_factory=dict)


_worlds: list[_World] = []  # the present one


def _watched(timeout: float) -> Watch | None:
    if distributed.get_world_size() == 1:
        return None
    from autopar.runtime.processes.launch import store_of_job
    from autopar.runtime.processes.watch import Watch

    watch = Watch(store_of_job(), distributed.get_rank(), distributed.get_world_size(), timeout=timeout)
    watch.start()
    return watch


def _join(mesh: Mesh, device: torch.device, device_mesh: DeviceMesh | None) -> Job:
    device_mesh = device_mesh or device_mesh_of(mesh, device.type)
    if device_mesh.device_type != "cpu":
        device = torch.device(device_mesh.device_type, torch.get_device_module(device_mesh.device_type).current_device())
    control = distributed.new_group(backend="gloo")
    return Job(distributed.get_rank(), device_mesh, groups_of(mesh, device_mesh), device, control)


def groups_of(mesh: Mesh, device_mesh: DeviceMesh) -> dict[tuple[int, ...], str]:
    """The groups of this rank along each axis, and along several as one. All ranks make all groups, in one order.

    Raises:
        ValueError: ranks along an axis are not ascending, as they are in a process group.
    """
    rank = distributed.get_rank()
    axes = [axis for axis, size in mesh.axes if size > 1]
    found = {}
    for axis in axes:
        ranks = mesh.group(rank, axis)
        if list(ranks) != sorted(ranks):
            raise ValueError(f"{mesh!r} has the ranks {list(ranks)} along {axis}; number them in ascending order along every axis")
        found[ranks] = device_mesh.get_group(axis).group_name
    joint = [some for n in range(2, len(axes)) for some in itertools.combinations(axes, n)]
    for some in joint:
        for ranks in sorted({tuple(sorted(mesh.group(one, some))) for one in mesh.ranks}):
            group = distributed.new_group(list(ranks), use_local_synchronization=False)
            if rank in ranks:
                found[ranks] = group.group_name
    found[tuple(sorted(mesh.ranks))] = distributed.group.WORLD.group_name  # type: ignore[union-attr]
    return found


def _initialize(device: torch.device, timeout: float) -> None:
    """As ``init_process_group`` under torchrun. Groups wait longer than the watch does, which says more than they do."""
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "gloo" if device.type == "cpu" else None
    distributed.init_process_group(backend, timeout=datetime.timedelta(seconds=2 * timeout + 60))


def _check_size(mesh: Mesh, processes: int) -> None:
    if mesh.size != processes or sorted(mesh.ranks) != list(range(processes)):
        ranks = "" if mesh.ranks == tuple(range(mesh.size)) else f", {' '.join(map(str, mesh.ranks))}"
        raise ValueError(
            f"the mesh ({mesh}) has {mesh.size} rank{'s' * (mesh.size != 1)}{ranks}, and there {'is' if processes == 1 else 'are'} {processes} "
            f"process{'es' * (processes != 1)}; start one for each, as with torchrun --nproc-per-node {mesh.size}, or give a mesh of {processes}"
        )
