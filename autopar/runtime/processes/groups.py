"""Share process groups: one for each set of ranks, stream and purpose in a process, however many meshes use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import distributed

from autopar.ir.dtensor import device_mesh_of, with_an_axis
from autopar.ir.mesh import Mesh, ranks_by_group
from autopar.ir.streams import DEFAULT, Ranks, Stream
from autopar.runtime.processes.one_rank import alone
from autopar.runtime.wire.wire_groups import backend_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Key(NamedTuple):
    """What a process group is for. Groups are made in the order of their keys."""

    purpose: str
    ranks: Ranks  # in ascending order
    stream: str = DEFAULT


# Purposes. Collectives of two purposes may run at the same time, so they never share a group.
DATA = "data"  # the collectives of programs and of DTensors
CONTROL = "control"  # what ranks compare beside a step
CHECKPOINT = "checkpoint"  # saves that are written in a thread
ON_THE_HOST = frozenset({CONTROL, CHECKPOINT})  # these use gloo; data uses the backends of the default group, and gloo


class ProcessGroups:
    """The process groups that autopar has made since ``init_process_group``, and how many users each of them has.

    Every rank makes and closes all groups in one order, also groups that it is no member of. So all ranks know which
    groups exist, and agree on which ones to make and to close. The default group and the groups of a ``DeviceMesh``
    that the user has made belong to the user: they are used, and never closed.
    """

    def __init__(self) -> None:
        self._groups: dict[Key, distributed.ProcessGroup] = {}
        self._users: Counter[Key] = Counter()
        self._whole: dict[str, distributed.ProcessGroup] = {}  # by the type of device

    def __len__(self) -> int:
        return len(self._groups)

    def take(self, purpose: str, sets: Iterable[Ranks], taken: list[Key]) -> distributed.ProcessGroup:
        """Make the groups of disjoint sets of ranks, unless they exist. All ranks call it alike.

        Args:
            sets: disjoint sets of ranks; this rank is in one of them.
            taken: receives the keys of the groups, for ``release``.

        Returns:
            The group that this rank is a member of.
        """
        (group,) = self._take({Key(purpose, ranks) for ranks in sets}, taken).values()
        return group

    def take_streams(self, streams: Iterable[Stream], taken: list[Key]) -> dict[Stream, distributed.ProcessGroup]:
        """Make the groups of streams, unless they exist. All ranks call it alike, with the streams of all ranks.

        ``taken``: as in ``take``.

        Returns:
            The groups that this rank is a member of.
        """
        groups = self._take({Key(DATA, ranks, stream) for ranks, stream in streams}, taken)
        return {(key.ranks, key.stream): group for key, group in groups.items()}

    def _take(self, wanted: Collection[Key], taken: list[Key]) -> dict[Key, distributed.ProcessGroup]:
        keys, rank = sorted(wanted), distributed.get_rank()
        if alone() is not None:  # no other rank has to make the groups of others, too
            keys = [key for key in keys if rank in key.ranks]
        for key in keys:
            if key not in self._groups:
                backend = "gloo" if key.purpose in ON_THE_HOST and alone() is None else _backends_of_data()
                self._groups[key] = distributed.new_group(
                    list(key.ranks), backend=backend, use_local_synchronization=False
                )
        self._users.update(keys)
        taken += keys
        return {key: self._groups[key] for key in keys if rank in key.ranks}

    def release(self, taken: Sequence[Key]) -> None:
        """Close the groups that have no other user. All ranks call it alike, when nothing runs in these groups."""
        self._users.subtract(taken)
        unused = [key for key in self._groups if self._users[key] <= 0]
        for key in reversed(unused):  # the newest first, as destroy_process_group() does
            distributed.destroy_process_group(self._groups.pop(key))  # does nothing where this rank is no member

    def device_mesh(self, mesh: Mesh, device_type: str, taken: list[Key]) -> DeviceMesh:
        """Return torch's mesh of the same ranks, with shared groups. All ranks call it alike, also those not on it.

        ``taken``: as in ``take``.
        """
        mesh, whole = with_an_axis(mesh), self.whole(self._whole_world(device_type), taken)
        ranks = distributed.get_world_size()
        groups: list[distributed.ProcessGroup] = []
        for axis, size in mesh.axes:
            sets = groups_over(mesh, (axis,))
            groups += [whole] if size == ranks else self._take({Key(DATA, group) for group in sets}, taken).values()
        return device_mesh_of(mesh, device_type, groups)

    def _whole_world(self, device_type: str) -> distributed.ProcessGroup:
        """Return the group of all ranks for a device type: the default group, if that has a backend for the type.

        It also chooses this process's device, if neither the user nor the launcher has done so.
        """
        if device_type not in self._whole:
            every = Mesh({"rank": distributed.get_world_size()})
            self._whole[device_type] = device_mesh_of(every, device_type).get_group(0)
        return self._whole[device_type]

    def whole(self, given: distributed.ProcessGroup | None, taken: list[Key]) -> distributed.ProcessGroup:
        """Return a group of all ranks that serves tensors on the CPU, too: the given one, or one of autopar's.

        A user's ``init_process_group("nccl")`` serves a GPU alone. ``taken``: as in ``take``.
        """
        if given is not None and backend_of(given, "cpu"):
            return given
        return self.take(DATA, [tuple(range(distributed.get_world_size()))], taken)


def _backends_of_data() -> str | None:
    """Return the backends of a data group: those of the default group, and one for tensors on the CPU.

    ``None`` where the default group, whose backends a new group has, has one for the CPU.
    """
    if backend_of(None, "cpu"):
        return None
    return f"cpu:gloo,{distributed.get_backend_config()}"


def groups_over(mesh: Mesh, axes: Sequence[str]) -> list[Ranks]:
    """Return the sets of ranks that differ only along the given axes."""
    return sorted(tuple(sorted(ranks)) for ranks in ranks_by_group(mesh, axes))


_present: list[tuple[distributed.ProcessGroup | None, ProcessGroups]] = []  # of the present default group


def process_groups() -> ProcessGroups:
    """Return the process groups of the present default group. Another ``init_process_group`` begins without any."""
    world = distributed.group.WORLD
    if not _present or _present[0][0] is not world:
        _present[:] = [(world, ProcessGroups())]
    return _present[0][1]
