"""Check the communication of local programs by classes of ranks: the time hardly grows with the number of ranks.

Ranks of a class share a graph; only their coordinates differ. Let all classes run the same collectives, line by line,
on meshes of all their ranks, and no messages. Then all ranks finish on any channels: when every rank has reached its
n-th collective, the members of each group have all reached the same one, and go on. What is left to check is that the
members of a group agree on it. It depends on two things alone:

* which classes meet in a group, because the payload is the same on all ranks of a class;
* at which places of a group a class stands, because the size of a rank's piece is that of its class, and the size that
  the collective states is that of its place.

Each of these few combinations is checked once for each collective; they are read off an array that has the class of
each rank. Every rank is in one of them, so this accepts exactly what ``check_programs`` accepts of such programs. All
others, those with stages or with something wrong, go to ``check_programs``, which names the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir import transfers
from autopar.ir.mesh import Mesh, positions_by_group
from autopar.ir.program import Program
from autopar.verify.channels.programs import Communication, check_programs, communication_of
from autopar.verify.channels.tasks import ALL, Channels


@dataclass(frozen=True)
class RankClass:
    """The ranks that share a local program.

    Attributes:
        program: that of one of them.
        ranks: all of them.
    """

    program: Program
    ranks: Sequence[int]


def check_classes(classes: Sequence[RankClass], channels: Iterable[Channels] = ALL) -> None:
    """Check the local programs of all ranks, given by class.

    Raises:
        ChannelError: as ``check_programs``.
    """
    if not agree(classes):
        check_programs(
            {rank: one.program.at(_mesh(one).coordinates(rank)) for one in classes for rank in one.ranks}, channels
        )


def agree(classes: Sequence[RankClass]) -> bool:
    """Return whether all ranks run the same collectives, and the members of each group agree on them.

    ``False`` may also mean that only ``check_programs`` can tell.
    """
    walks = [communication_of(one.program) for one in classes]
    if not walks or any(walk != walks[0] for walk in walks) or any(item.node for item in walks[0]):
        return False
    meshes = [one.program.meshes for one in classes]
    if any(other != meshes[0] for other in meshes):
        return False
    ranks, of_rank = set[int](), dict[int, int]()
    for number, one in enumerate(classes):
        ranks.update(one.ranks)
        of_rank.update(dict.fromkeys(one.ranks, number))
    if len(of_rank) != sum(len(one.ranks) for one in classes):  # a rank is in two classes
        return False
    known: dict[tuple[str | None, tuple[str, ...]], _Meetings] = {}
    for number, item in enumerate(walks[0]):
        stage, axis = item.place
        if stage not in meshes[0] or ranks != set(meshes[0][stage].ranks):
            return False
        key = stage, transfers.axes_of(axis)
        if key not in known:
            if any(name not in meshes[0][stage].sizes for name in key[1]):
                return False
            known[key] = _Meetings.of(meshes[0][stage], key[1], of_rank)
        if not known[key].agree([walk[number] for walk in walks]):
            return False
    return True


@dataclass(frozen=True)
class _Meetings:
    """Where the classes stand in the groups over some axes.

    Attributes:
        together: the sets of classes that meet in a group, each once.
        classes, places: the pairs of a class and a place in a group, each once, as two arrays.
    """

    together: tuple[tuple[int, ...], ...]
    classes: np.ndarray
    places: np.ndarray

    @staticmethod
    def of(mesh: Mesh, axes: tuple[str, ...], of_rank: dict[int, int]) -> _Meetings:
        number = np.array([of_rank[rank] for rank in mesh.ranks])
        groups = number[positions_by_group(mesh, axes)]
        patterns = np.unique(groups, axis=0)
        together = dict.fromkeys(tuple(np.unique(row).tolist()) for row in patterns)
        places = np.broadcast_to(np.arange(patterns.shape[1]), patterns.shape)
        pairs = np.unique(np.stack([patterns.ravel(), places.ravel()], axis=1), axis=0)
        return _Meetings(tuple(together), pairs[:, 0], pairs[:, 1])

    def agree(self, items: Sequence[Communication]) -> bool:
        """Return whether the members of all groups agree on a collective; ``items``: its line in each class."""
        for together in self.together:
            first, *others = (items[number].payload for number in together)
            if any(other != first for other in others):
                return False
        return all(self._has_stated_sizes(number, item) for number, item in enumerate(items))

    def _has_stated_sizes(self, number: int, item: Communication) -> bool:
        """Return whether the pieces of a class have the sizes that the collective states for their places."""
        if item.piece is None:
            return True
        size, sizes, _ = item.piece
        places = self.places[self.classes == number]
        return bool((places < len(sizes)).all()) and all(sizes[place] == size for place in places.tolist())


def _mesh(one: RankClass) -> Mesh:
    mesh = one.program.mesh
    assert mesh is not None
    return mesh
