"""Follow one rank by its beats."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.runtime.current_op import CurrentOp
from autopar.runtime.processes.watch.beat import ALIVE, UNKNOWN, Beat


@dataclass(frozen=True)
class RankState:
    """The state of one rank as another rank sees it. Seconds are those of the watching rank."""

    beat: Beat | None  # None: the rank has not begun
    process: str  # running, stopped, dead, unknown
    silent: float  # seconds since its newest beat came
    still: float  # seconds since it last made progress
    settled: float  # seconds since its state changed
    unreachable: bool = False  # whether the kernel of its host does not answer any more

    def is_in(self, *states: str) -> bool:
        return self.beat is not None and self.beat.state in states

    @property
    def inside(self) -> bool:
        return self.beat is not None and self.beat.state == ALIVE and self.beat.place.inside


class FollowedRank:
    """One rank, updated by its beats. Times are those of the watching rank's clock."""

    def __init__(self) -> None:
        self.beat: Beat | None = None
        self.process = UNKNOWN
        self.came = self.moved = self.settled = 0.0

    def take(self, beat: Beat, now: float) -> None:
        last, self.beat = self.beat, beat
        if last is None or beat.sequence != last.sequence:
            self.came = now
        if last is None or beat.state != last.state:
            self.settled = now
        if last is None or _progress(beat.place) != _progress(last.place):
            self.moved = now

    def state(self, now: float, unreachable: bool = False) -> RankState:
        return RankState(self.beat, self.process, now - self.came, now - self.moved, now - self.settled, unreachable)


def _progress(place: CurrentOp) -> tuple[int, str]:
    """Return a value that changes while a rank makes progress. Outside of a step, nothing counts as progress."""
    return place.ticks, place.text if place.inside else ""
