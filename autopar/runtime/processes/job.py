"""Join the processes of a mesh into a job: one process a rank, with process groups along the axes."""

from __future__ import annotations

import datetime
import itertools
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from autopar.ir.dtensor import mesh_of, with_an_axis
from autopar.ir.hosts import Hosts
from autopar.ir.mesh import Mesh
from autopar.ir.streams import DEFAULT, GroupKey, Stream, group_key
from autopar.runtime.processes.agreement import Agreement
from autopar.runtime.processes.groups import CONTROL, DATA, Key, ProcessGroups, groups_over, process_groups
from autopar.runtime.processes.hosts import hosts_of
from autopar.runtime.processes.one_rank import alone
from autopar.runtime.wire.wire_groups import BACKEND, EMULATED, backend_of, check_default_group, completes_in_order
from autopar.torch_private import forget_groups, forget_meshes, group_named

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from autopar.runtime.processes.watch import Watch


import time
import uuid

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets


@dataclass(eq=False)
class Job:
    """This process as one rank of a mesh.

    Attributes:
        rank: the rank of this process, on the mesh and in the world.
        device_mesh: torch's mesh of the same ranks and names, with a process group for each axis.
        groups: the names of this rank's groups: along each axis, along several axes as one, and those of further
            streams.
        known: the streams of all ranks that have a group, the default ones included; equal on all ranks.
        device: the device of this rank's pieces.
        control: a gloo group of all ranks, for messages besides those of the step; without other processes, the
            default group.
        hosts: the host of each rank.
        taken: the keys of the shared groups that the job uses.
        made_mesh: whether the device mesh is autopar's, and not the user's.
        models: how many models use it that are not closed.
        stages: torch's meshes of the stages that ``device_meshes`` has made.
        surface: compares what the user calls on tensors of the mesh, besides models; ``None`` if there is one rank.
    """

    rank: int
    device_mesh: DeviceMesh
    groups: dict[GroupKey, str]
    known: set[Stream]
    device: torch.device
    control: distributed.ProcessGroup
    hosts: Hosts
    taken: tuple[Key, ...] = ()
    made_mesh: bool = False
    models: int = 0
    stages: dict[Mesh, DeviceMesh] = field(default_factory=dict)
    surface: Agreement | None = None

    def device_meshes(self, meshes: Iterable[Mesh]) -> dict[Mesh, DeviceMesh]:
        """Return torch's mesh of each mesh: of the whole one, or of a stage. All ranks call it alike.

        On a rank that is not on a stage, the stage's mesh has no process groups.
        """
        whole, groups, taken = mesh_of(self.device_mesh), process_groups(), list[Key]()
        found = {}
        for mesh in sorted(set(meshes), key=lambda mesh: (mesh.ranks, mesh.axes)):
            unnamed = with_an_axis(Mesh(mesh.sizes, ranks=mesh.ranks))
            if unnamed != whole and unnamed not in self.stages:
                self.stages[unnamed] = groups.device_mesh(unnamed, self.device_mesh.device_type, taken)
            found[mesh] = self.device_mesh if unnamed == whole else self.stages[unnamed]
        self.taken = (*self.taken, *taken)
        return found

    @property
    def in_order(self) -> bool:
        """Whether the groups of this rank end their collectives in the order in which these are started."""
        return all(
            completes_in_order(name, backend_of(group_named(name), self.device.type)) for name in self.groups.values()
        )


def job_of(
    mesh: Mesh, device: torch.device, device_mesh: DeviceMesh | None, timeout: float, call: str = "parallelize"
) -> Job | None:
    """Return the job that this process belongs to, or ``None`` if the process is alone. All ranks call it.

    If torchrun has started the process, and no process group has been initialised, this function initialises it.

    Args:
        call: what the user calls, in words that all ranks compare.

    Raises:
        ValueError: the mesh does not have as many ranks as there are processes.
        RuntimeError: another rank passes another mesh, or makes another call; or a wire is emulated, and the default
            process group is not on it.
    """
    if not distributed.is_available():
        return None
    if not distributed.is_initialized():
        if not all(os.environ.get(name) for name in LAUNCHED):
            return None
        _check_size(mesh, int(os.environ["WORLD_SIZE"]))
        _initialize(device, timeout)
    _check_size(mesh, distributed.get_world_size())
    if device.type == "cpu":
        check_default_group()
    if not _worlds or _worlds[0].group is not distributed.group.WORLD:
        if _worlds:
            forget_meshes()  # this process may be another rank now
        _worlds[:] = [_World(distributed.group.WORLD, _watched(timeout))]
    if alone() is not None:
        return _job_in_world(mesh, device, device_mesh)
    groups, taken = process_groups(), list[Key]()
    control = groups.take(CONTROL, [tuple(sorted(mesh.ranks))], taken)
    try:  # else ranks that give different meshes would wait for each other, each in another collective
        Agreement(control, mesh).agree(
            f"{call} on {mesh!r} of {device.type}" + ", given as a DeviceMesh" * (device_mesh is not None)
        )
        return _job_in_world(mesh, device, device_mesh)
    finally:
        groups.release(taken)  # the job has taken the group, too


def _job_in_world(mesh: Mesh, device: torch.device, device_mesh: DeviceMesh | None) -> Job:
    """Return the job of a mesh, which is made unless it exists."""
    jobs, key = _worlds[0].jobs, (mesh, device.type, device_mesh)
    if key not in jobs:
        jobs[key] = _join(mesh, device, device_mesh)
    return jobs[key]


def job_with(device_mesh: DeviceMesh, alone: bool = False) -> Job | None:
    """Return the job whose mesh, or a stage of it, this is.

    ``None`` where no other rank has a part of its tensors; with ``alone``, a job of one rank, too.
    """
    for job in _worlds[0].jobs.values() if _worlds else ():
        if (alone or job.surface is not None) and any(
            device_mesh is own for own in (job.device_mesh, *job.stages.values())
        ):
            return job
    return None


@dataclass
class _World:
    """The jobs of one ``init_process_group``: one for each mesh. They share a watch, with the first time-out."""

    group: distributed.ProcessGroup | None
    watch: Watch | None
    jobs: dict[Any, Job] = field(default_factory=dict)

    def holds(self, job: Job) -> bool:
        """Return whether the groups of a job exist, and the user has not destroyed them."""
        return self.group is distributed.group.WORLD and any(other is job for other in self.jobs.values())

    def leave(self, job: Job) -> None:
        """Count a closed model of a job. The last one ends the job."""
        job.models -= 1
        if job.models == 0:
            self.jobs = {key: other for key, other in self.jobs.items() if other is not job}
            process_groups().release(job.taken)
            if job.surface is not None:
                job.surface.close()
            del job.control  # the group's threads end when nothing refers to it, and models keep the job
            for device_mesh in (*job.stages.values(), *([job.device_mesh] if job.made_mesh else [])):
                forget_groups(device_mesh)


_worlds: list[_World] = []  # none or one: that of the present default group


def _watched(timeout: float) -> Watch | None:
    if distributed.get_world_size() == 1 or alone() is not None:
        return None
    from autopar.runtime.processes.launch import store_of_job
    from autopar.runtime.processes.watch import Watch

    watch = Watch(store_of_job(), distributed.get_rank(), distributed.get_world_size(), timeout=timeout)
    watch.start()
    return watch


def _join(mesh: Mesh, device: torch.device, theirs: DeviceMesh | None) -> Job:
    """Make the groups of a mesh that no other mesh has made. ``theirs`` is the user's DeviceMesh, if there is one."""
    groups, taken, only = process_groups(), list[Key](), alone()
    control: Any = distributed.group.WORLD
    if only is None:
        control = groups.take(CONTROL, [tuple(sorted(mesh.ranks))], taken)
    device_mesh = theirs or groups.device_mesh(mesh, device.type, taken)
    if device_mesh.device_type != "cpu":
        device = torch.device(
            device_mesh.device_type, torch.get_device_module(device_mesh.device_type).current_device()
        )
    names = groups_of(mesh, device_mesh, groups, taken)
    known = {(ranks, DEFAULT) for axes in _combinations(mesh) for ranks in groups_over(mesh, axes)}
    hosts = hosts_of(Agreement(control, mesh)) if only is None else only.hosts
    if only is None and _worlds[0].watch is not None:
        _worlds[0].watch.followed.hosts = hosts
    return Job(
        distributed.get_rank(), device_mesh, names, known, device, control, hosts, tuple(taken), theirs is None,
        surface=None if only is not None or mesh.size == 1 else Agreement(control, mesh),
    )  # fmt: skip


def groups_of(mesh: Mesh, device_mesh: DeviceMesh, groups: ProcessGroups, taken: list[Key]) -> dict[GroupKey, str]:
    """Return the names of this rank's groups: along each axis, and along several axes as one.

    All ranks make all groups, in one order.

    Args:
        device_mesh: torch's mesh of the same ranks, whose groups are those along one axis.
        taken: receives the keys of the other groups.
    """
    rank = distributed.get_rank()
    names: dict[GroupKey, str] = {}
    for axes in _combinations(mesh):
        if len(axes) == 1:
            group = device_mesh.get_group(axes[0])
        elif mesh.count(axes) < mesh.size:
            group = groups.take(DATA, groups_over(mesh, axes), taken)
        else:
            continue
        names[group_key(mesh.group(rank, axes), DEFAULT)] = group.group_name
    names[group_key(mesh.ranks, DEFAULT)] = groups.whole(distributed.group.WORLD, taken).group_name
    return names


def _combinations(mesh: Mesh) -> list[tuple[str, ...]]:
    """Return the axes along which ranks differ, alone and together, up to all of them."""
    axes = [axis for axis, size in mesh.axes if size > 1]
    return [several for n in range(1, len(axes) + 1) for several in itertools.combinations(axes, n)]


class Membership:
    """A model's use of a job, from ``parallelize`` to ``close``. The last model that uses a group closes it.

    Args:
        job: the job of the model; ``None`` in a process that is alone.
        agreement: the agreement of the model; ``None`` if there is one rank.
    """

    def __init__(self, job: Job | None, agreement: Agreement | None) -> None:
        self._job, self._agreement, self._closed = job, agreement, False
        if job is not None:
            job.models += 1

    def check(self) -> None:
        """Raise ``RuntimeError`` after ``close``."""
        if self._closed:
            raise RuntimeError("this model is closed, and its process groups may be, too; call parallelize again")

    def close(self) -> None:
        """Give the job back. All ranks call it; a second call does nothing.

        It waits for the other ranks, but not while an exception is handled: another rank may be inside a collective
        that this rank never reaches. Then the groups end with the process.

        Raises:
            RuntimeError: a rank makes another call. The model is closed on no rank then.
        """
        present = self._job is not None and bool(_worlds) and _worlds[0].holds(self._job)
        if not self._closed and self._job is not None and present and sys.exc_info()[0] is None:
            if self._agreement is not None:
                self._agreement.agree("close the model")  # no rank has anything left to send or to receive
                self._agreement.close()
            _worlds[0].leave(self._job)
        self._closed = True


def _initialize(device: torch.device, timeout: float) -> None:
    """Initialize the process groups as under torchrun.

    Their time-out is longer than the watch's, because the watch explains more than they do.
    """
    if device.type == "cpu":
        backend = BACKEND if EMULATED else "gloo"
    else:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
        backend = f"cpu:gloo,{device.type}:{distributed.get_default_backend_for_device(device)}"
    patience = datetime.timedelta(seconds=2 * timeout + 60)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        distributed.init_process_group(backend, timeout=patience)
        return
    rank, ranks, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = distributed.TCPStore(os.environ["MASTER_ADDR"], port, ranks, is_master=False, timeout=patience)
    own = store_of_start(store, rank, ranks, patience.total_seconds())
    distributed.init_process_group(backend, store=own, rank=rank, world_size=ranks, timeout=patience)


def _check_size(mesh: Mesh, processes: int) -> None:
    if mesh.size != processes or sorted(mesh.ranks) != list(range(processes)):
        nodes, per_node = (int(os.environ.get(name) or 1) for name in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        on_hosts = f" on {nodes} hosts" * (nodes > 1)
        needed, rest = divmod(mesh.size, per_node)
        start = f"--nproc-per-node {mesh.size}"
        if nodes > 1:
            start = f"--nnodes 1 {start}" if rest else f"--nnodes {needed} --nproc-per-node {per_node}"
        ranks = "" if mesh.ranks == tuple(range(mesh.size)) else f", {' '.join(map(str, mesh.ranks))}"
        raise ValueError(
            f"the mesh ({mesh}) has {mesh.size} rank{'s' * (mesh.size != 1)}{ranks}, and there "
            f"{'is' if processes == 1 else 'are'} {processes} process{'es' * (processes != 1)}{on_hosts}; "
            f"start one for each, as with torchrun {start}, or give a mesh of {processes}"
        )


# -- each start of a job under torchrun --------------------------------------------------------------------------------
#
# Give each start of a job under torchrun a part of the launcher's store of its own.
#
# The launcher's store outlives the ranks, and still has the addresses and the verdict of those before. Nothing that
# torchrun says to a rank numbers the starts: a launcher counts only the restarts that its own ranks have caused, and
# one that has come back begins at 0. So the first rank numbers them. Each other rank arrives under a name that was
# never used, and the first one answers it.


PREFIX = "autopar/starts"
PAUSE = 0.02  # seconds between two looks of the first rank


def store_of_start(store: distributed.Store, rank: int, ranks: int, patience: float) -> distributed.Store:
    """Return the part of a store that the ranks of this start share. All ranks call it.

    Args:
        store: that of the launcher, which earlier starts have used.
        patience: seconds that the first rank waits for the others, which then wait in vain.
    """
    if rank == 0:
        number = store.add(PREFIX, 1)
        _answer(store, number, ranks, time.monotonic() + patience)
    else:
        own = uuid.uuid4().hex
        store.set(f"{PREFIX}/arrived/{rank}", own)
        number = int(store.get(f"{PREFIX}/number of/{own}"))  # it waits
        store.set(f"{PREFIX}/{number}/joined/{rank}", "")
    return distributed.PrefixStore(f"start {number}", store)


def _answer(store: distributed.Store, number: int, ranks: int, end: float) -> None:
    """Answer all ranks until each has joined; names that ranks of earlier starts have left are answered, too."""
    left = list(range(1, ranks))
    while left and time.monotonic() < end:
        left = [rank for rank in left if not store.check([f"{PREFIX}/{number}/joined/{rank}"])]
        for rank in left:
            if store.check([f"{PREFIX}/arrived/{rank}"]):
                name = store.get(f"{PREFIX}/arrived/{rank}").decode()
                store.set(f"{PREFIX}/number of/{name}", str(number))
        if left:
            time.sleep(PAUSE)
