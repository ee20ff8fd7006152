"""Say on which host each rank of a job runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job: ``Hosts(("a", "b"), (0, 0, 1, 1))`` has the ranks 0 and 1 on ``a``, and 2 and 3 on ``b``.

    Attributes:
        names: the hosts, in the order of their first ranks.
        of_rank: the index of its host in ``names``, by rank.
    """

    names: tuple[str, ...]
    of_rank: tuple[int, ...]

    @staticmethod
    def of(identities: Iterable[tuple[str, str]]) -> Hosts:
        """Return the hosts of ranks that say in their order who they are: (launcher's number of the node, host name).

        Ranks with equal pairs share a host. Different nodes with one host name are told apart by their numbers.
        """
        pairs = [*identities]
        different = {pair: index for index, pair in enumerate(dict.fromkeys(pairs))}
        shared = Counter(name for _, name in different)
        names = [f"{name} (node {number})" if shared[name] > 1 else name for number, name in different]
        return Hosts(tuple(names), tuple(different[pair] for pair in pairs))

    def __len__(self) -> int:
        return len(self.names)

    def name(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return self.names[self.of_rank[rank]]

    def ranks(self, host: int) -> tuple[int, ...]:
        """Return the ranks on a host, by its index."""
        return self._ranks[host]

    @cached_property
    def _ranks(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.names]
        for rank, host in enumerate(self.of_rank):
            found[host].append(rank)
        return tuple(map(tuple, found))

    @cached_property
    def ranks_per_host(self) -> int | None:
        """The number of ranks on each host; ``None`` if hosts differ in it, or their ranks do not follow each other."""
        per_host = len(self._ranks[0])
        even = tuple(rank // per_host for rank in range(len(self.of_rank)))
        return per_host if self.of_rank == even and len(even) == per_host * len(self) else None

    def whole(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the hosts whose ranks are all among ``ranks``."""
        given = set(ranks)
        return tuple(name for name, own in zip(self.names, self._ranks, strict=True) if given.issuperset(own))
