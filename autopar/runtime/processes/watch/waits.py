"""Follow the waits of ranks that make no progress, to those who hold up the others.

    0 → 1 → 2        rank 0 waits for rank 1, and that for rank 2, which waits for nobody: it holds up the others
    0 → 1 ⇄ 2        ranks 1 and 2 wait for each other: no rank outside of this cycle can end it

A rank in a collective waits for those of its peers that are not in it. All is linear in the number of waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.runtime.current_op import CurrentOp


@dataclass(frozen=True)
class Waits:
    """The waits of all ranks.

    Attributes:
        places: rank → what it is in, of the ranks that are inside a step.
        ranks: all ranks of the job.
    """

    places: Mapping[int, CurrentOp]
    ranks: Collection[int]

    @cached_property
    def known(self) -> list[int]:
        """The ranks that have said whom they wait for."""
        return sorted(rank for rank, place in self.places.items() if place.peers)

    @cached_property
    def edges(self) -> dict[int, list[int]]:
        """Rank → the ranks that it waits for."""
        return {rank: [peer for peer in self.places[rank].peers if self._is_awaited(peer, rank)] for rank in self.known}

    @cached_property
    def ends(self) -> list[int]:
        """The ranks to which waits lead, and that wait for nobody: they do something else, or all are in one
        collective."""
        led = {peer for peers in self.edges.values() for peer in peers} | set(self.known)
        return sorted(rank for rank in led if not self.edges.get(rank))

    def outwards(self, ends: Iterable[int]) -> list[int]:
        """Return the ranks whose waits lead to ``ends``: first those that wait for one of these, and so on."""
        waiting: dict[int, list[int]] = {}
        for rank, peers in self.edges.items():
            for peer in peers:
                waiting.setdefault(peer, []).append(rank)
        found, ring = set(ends), list(ends)
        order: list[int] = []
        while ring:
            ring = sorted({rank for end in ring for rank in waiting.get(end, ())} - found)
            found.update(ring)
            order += ring
        return order

    @cached_property
    def endless(self) -> list[int]:
        """The ranks whose waits lead to none of the ``ends``."""
        free = {*self.ends, *self.outwards(self.ends)}
        return [rank for rank in self.known if rank not in free]

    @cached_property
    def apart(self) -> list[int]:
        """The ranks of one group that wait in different collectives of it, and so for each other."""
        members: dict[int, list[int]] = {}
        for rank, group in self._groups.items():
            members.setdefault(group, []).append(rank)
        for rank in self.endless:
            together = members.get(self._groups.get(rank, -1), [])
            if len({self._collectives[member] for member in together}) > 1:
                return together
        return []

    @cached_property
    def cycle(self) -> list[int]:
        """Ranks each of which waits for the next, and the last for the first; empty if no waits are endless."""
        seen: dict[int, None] = {}
        rank = min(self.endless, default=None)
        while rank is not None and rank not in seen:
            seen[rank] = None
            rank = min(self.edges[rank])
        return [] if rank is None else self._shortest_cycle(min(list(seen)[list(seen).index(rank) :]))

    def _shortest_cycle(self, first: int) -> list[int]:
        before = {first: first}
        reached = [first]
        for rank in reached:
            if first in self.edges[rank]:
                row = [rank]
                while row[-1] != first:
                    row.append(before[row[-1]])
                return row[::-1]
            for peer in self.edges[rank]:
                if peer not in before:
                    before[peer] = rank
                    reached.append(peer)
        raise AssertionError(f"rank {first} is in no cycle")

    def _is_awaited(self, peer: int, rank: int) -> bool:
        own = self._collectives.get(rank)
        return peer != rank and peer in self.ranks and (own is None or self._collectives.get(peer) != own)

    @cached_property
    def _groups(self) -> dict[int, int]:
        """Rank in a collective → the number of the group of ranks that enter it."""
        numbers: dict[frozenset[int], int] = {}
        inside = [rank for rank in self.known if self.places[rank].collective]
        return {rank: numbers.setdefault(frozenset((rank, *self.places[rank].peers)), len(numbers)) for rank in inside}

    @cached_property
    def _collectives(self) -> dict[int, tuple[int, str]]:
        """Rank in a collective → its group and its name."""
        return {rank: (group, self.places[rank].collective) for rank, group in self._groups.items()}
