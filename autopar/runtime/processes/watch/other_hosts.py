"""Know what this rank cannot see itself: whether other hosts are there, and how the processes on them fare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.runtime.processes.hosts import own_identity
from autopar.runtime.processes.watch.beat import UNKNOWN, Beat
from autopar.runtime.processes.watch.followed_rank import FollowedRank
from autopar.runtime.processes.watch.keepalive import Connection, Listener


class OtherHosts:
    """The hosts of the other ranks.

    Attributes:
        own: the launcher's number of this node, and the name of this host.
        listener: what the other hosts connect to, on the first rank of this host.
    """

    def __init__(self) -> None:
        self.own, self.listener = own_identity(), Listener()
        self._connections: dict[tuple[str, str], Connection] = {}

    def follow(self, beat: Beat, is_new: bool) -> None:
        """Connect to the kernel of a host, again if it was lost and has come back. ``is_new``: the beat just came."""
        if not beat.listener or beat.host == self.own:
            return
        before = self._connections.get(beat.host)
        if before is not None and is_new:
            before.heard()
        if before is None or (is_new and before.is_lost()):
            self._connections[beat.host] = Connection(beat.listener)

    def lost(self) -> set[tuple[str, str]]:
        """Return the hosts whose kernels do not answer any more."""
        return {host for host, connection in self._connections.items() if connection.is_lost()}


def take_neighbours(ranks: Mapping[int, FollowedRank]) -> None:
    """Set the state of processes on other hosts to what ranks on their hosts have told."""
    for beat in _beats(ranks.values()):
        for rank, state in beat.neighbours.items():
            if ranks[rank].process == UNKNOWN:
                ranks[rank].process = state


def _beats(ranks: Iterable[FollowedRank]) -> list[Beat]:
    return [rank.beat for rank in ranks if rank.beat is not None]
