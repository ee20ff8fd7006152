"""Word what ranks are doing: ranks that do the same share a clause. Name ranks together with their hosts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.hosts import Hosts
from autopar.runtime.current_op import CurrentOp
from autopar.runtime.processes.watch.beat import ENDED, Beat, RankState

QUIET = 3.0  # seconds without a beat after which a rank is called silent
INLINE = 3  # so many clauses stand on one line; of more, each has a line of its own
LINES = 16  # lines of clauses at most

Verbs = tuple[str, str]  # for one rank, and for several
WAITS: Verbs = ("waits", "wait")
IS: Verbs = ("is", "are")


@dataclass(frozen=True)
class _Activity:
    """The activity of a rank, in words for one rank and for several."""

    verbs: Verbs
    place: str = ""


def clauses(
    states: Mapping[int, RankState], ranks: Iterable[int], *, alone: Verbs = WAITS, together: Verbs = WAITS
) -> list[str]:
    """Return what ranks are doing: ``ranks 0 1 wait in mm_tp : f32[4] = all_reduce(mm, tp)``.

    Args:
        alone: the verbs of ranks that are inside a step, and have not said whom they wait for.
        together: the verbs of ranks in a collective.
    """
    groups: dict[_Activity, list[int]] = {}
    for rank in ranks:
        groups.setdefault(_activity(states[rank], alone, together), []).append(rank)
    return [
        f"{in_words(members)} {activity.verbs[len(members) > 1]}{activity.place}"
        for activity, members in groups.items()
    ]


def _activity(state: RankState, alone: Verbs, together: Verbs) -> _Activity:
    beat = state.beat
    if beat is None:
        return _Activity(("has not begun", "have not begun"))
    if beat.state == ENDED:
        return _Activity(("has ended", "have ended"))
    place = " " + at(beat.place)
    if state.silent >= QUIET:
        return _Activity(("is silent, last seen", "are silent, last seen"), place)
    if not beat.place.inside:
        return _Activity(("is outside of a step,", "are outside of a step,"), place)
    if beat.place.peers and not beat.place.collective:
        return _Activity(WAITS, f" for {in_words(beat.place.peers)}{place}")
    return _Activity(together if beat.place.collective else alone, place)


def joined(first: Sequence[str], then: Sequence[str]) -> str:
    """Join clauses: on one line, or below the first if they are many."""
    every = [*first, *then]
    if len(every) <= INLINE:
        return "; ".join(every)
    return every[0] + lines(every[1:])


def lines(every: Sequence[str]) -> str:
    """Return clauses on lines of their own, below another line."""
    left = len(every) - LINES
    return "".join(f"\n  {clause}" for clause in every[:LINES]) + (f"\n  and {left} more" if left > 0 else "")


def last_seen(beat: Beat) -> str:
    return f"it was last seen {at(beat.place)}"


def at(place: CurrentOp) -> str:
    return f"{'in' if place.inside else 'at'} {place.text}"


def in_words(ranks: Sequence[int]) -> str:
    shown = " ".join(str(rank) for rank in ranks[:16]) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {shown}"


# -- ranks with their hosts --------------------------------------------------------------------------------------------


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
