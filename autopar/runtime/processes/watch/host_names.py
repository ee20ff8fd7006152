"""Name ranks together with their hosts, as their beats tell them. In a job on one host no host is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.hosts import Hosts
from autopar.runtime.processes.watch.followed_rank import RankState
from autopar.runtime.processes.watch.wording import in_words


class HostNames:
    """The hosts of ranks.

    Args:
        states: rank → its state, of the ranks that have begun.
        hosts: the hosts of all ranks, if the job has compared them.
    """

    def __init__(self, states: Mapping[int, RankState], hosts: Hosts | None = None) -> None:
        if hosts is not None:
            self._names = dict(enumerate(map(hosts.name, range(len(hosts.of_rank))))) if len(hosts) > 1 else {}
            return
        identities = [
            (rank, s.beat.host) for rank, s in sorted(states.items()) if s.beat is not None and s.beat.host[1]
        ]
        hosts = Hosts.of(identity for _, identity in identities)
        several = len(hosts) > 1
        self._names = {rank: hosts.name(k) for k, (rank, _) in enumerate(identities)} if several else {}

    def of(self, rank: int) -> str:
        """Return the name of a rank's host; empty if all ranks are on one."""
        return self._names.get(rank, "")

    def ranks(self, name: str) -> tuple[int, ...]:
        """Return the ranks on a host."""
        return tuple(rank for rank, host in self._names.items() if host == name)

    def named(self, rank: int) -> str:
        """Return a rank in words, with its host: ``rank 2 on host beta``."""
        host = self.of(rank)
        return f"rank {rank} on host {host}" if host else f"rank {rank}"

    def whole(self, ranks: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the hosts that have all their ranks among the given ones, and these ranks."""
        given = set(ranks)
        found = {name: self.ranks(name) for name in dict.fromkeys(self.of(rank) for rank in ranks) if name}
        return {name: own for name, own in found.items() if given.issuperset(own)}

    def with_ranks(self, name: str) -> str:
        """Return a host in words, with its ranks: ``host beta (ranks 2 3)``."""
        return f"host {name} ({in_words(self.ranks(name))})" if name else "this host"
