"""Follow all ranks of a job by their beats, which come through the store."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from autopar.ir.hosts import Hosts
from autopar.runtime.processes.watch.alarm import Alarm
from autopar.runtime.processes.watch.beat import ALIVE, CUT, DEAD, ENDED, STOPPED, Beat, FollowedRank, RankState
from autopar.runtime.processes.watch.other_hosts import OtherHosts, take_neighbours
from autopar.runtime.processes.watch.verdict import GRACE
from autopar.runtime.processes.watch.wording import HostNames

INTERVAL = 0.5  # seconds between beats
WITNESSES = 4  # so many ranks watch all others; every other rank only checks that one of these is alive


class FollowedRanks:
    """What one rank knows of all ranks.

    Attributes:
        ranks: what it knows of each.
        clock: seconds that its thread was awake: time in which a laptop slept does not count.
        hosts: the hosts of all ranks, once the job has compared them.
        other_hosts: whether the other hosts are there.

    Args:
        store: the part of the job's store that has the beats.
        rank: this rank.
        count: the number of ranks.
        alarm: is set off when a process of this host ends.
        several: whether the job has several hosts.
    """

    def __init__(self, store: Any, rank: int, count: int, alarm: Alarm, *, several: bool) -> None:
        self._store, self._rank, self._alarm, self._several = store, rank, alarm, several
        self._multi_get: bool = store.has_extended_api()
        self.ranks = {r: FollowedRank() for r in range(count)}
        self.clock = 0.0
        self.hosts: Hosts | None = None
        self.other_hosts = OtherHosts()

    @property
    def first(self) -> Beat | None:
        """The newest beat of rank 0."""
        return self.ranks[0].beat

    def look(self, ranks: Iterable[int]) -> None:
        """Take the newest beats of ranks: all in one message, because a slow link may have seconds of delay."""
        begun = []
        for rank in ranks:
            other = self.ranks[rank]
            if other.beat is not None:  # first the process, then the beat: a rank posts that it ended before it dies
                other.process = other.beat.process.state()
            elif not self._store.check([f"beat/{rank}"]):  # ``get`` would wait for a missing key
                continue
            begun.append(rank)
        keys = [f"beat/{rank}" for rank in begun]
        texts = self._store.multi_get(keys) if self._multi_get and keys else [self._store.get(key) for key in keys]
        for rank, text in zip(begun, texts, strict=True):
            beat = Beat.load(text)
            self.ranks[rank].take(beat, self.clock)
            if rank != self._rank:
                self._alarm.look_at(beat.process)
            if self._rank < WITNESSES:
                self.other_hosts.follow(beat, self.clock - self.ranks[rank].came < INTERVAL)

    def neighbours(self) -> dict[int, str]:
        """Return the ranks of this host that are stopped or dead: other hosts cannot see it."""
        if not self._several:
            return {}
        first, found = self._rank - int(os.environ.get("LOCAL_RANK", 0)), {}
        for rank in range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", 1))):
            if self.ranks[rank].beat is None:
                self.look([rank])
            beat = self.ranks[rank].beat
            if rank != self._rank and beat is not None and (state := beat.process.state()) in (STOPPED, DEAD):
                found[rank] = state
        return found

    def can_judge(self, rank: int) -> bool:
        """Return whether a rank can print a verdict itself."""
        other = self.ranks[rank]
        return (
            other.beat is not None
            and other.beat.state in (ALIVE, CUT)
            and other.process not in (DEAD, STOPPED)
            and self.clock - other.came < GRACE
        )

    def states(self) -> dict[int, RankState]:
        """Return the state of each rank."""
        take_neighbours(self.ranks)
        lost = self.other_hosts.lost()
        return {
            rank: other.state(self.clock, other.beat is not None and other.beat.host in lost)
            for rank, other in self.ranks.items()
        }

    def names(self) -> HostNames:
        """Return the names of ranks with their hosts."""
        return HostNames(self.states(), self.hosts)

    def still_there(self) -> dict[int, Beat]:
        """Return the newest beats of the ranks beside rank 0 that have begun and not ended."""
        self.look(range(1, len(self.ranks)))
        beats = {rank: other.beat for rank, other in self.ranks.items() if rank != 0 and other.beat is not None}
        return {
            rank: beat
            for rank, beat in beats.items()
            if beat.state != ENDED and beat.process.state() not in (DEAD, STOPPED)
        }

    def that_leave(self) -> int:
        """Return how many ranks have begun and can still leave by themselves."""
        self.look(range(len(self.ranks)))
        take_neighbours(self.ranks)
        return sum(
            other.beat is not None
            and other.beat.state != ENDED
            and other.process not in (DEAD, STOPPED)
            and (rank == self._rank or self.clock - other.came < GRACE)
            for rank, other in self.ranks.items()
        )

    def gone(self) -> set[int]:
        """Return the ranks that have died or ended."""
        return {rank for rank, other in self.ranks.items() if other.process == DEAD or other.state(0.0).is_in(ENDED)}
