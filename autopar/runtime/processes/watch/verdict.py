"""Decide which rank is to blame, as a pure function of the beats of all ranks.

When one rank fails, the others soon fail too, or wait forever. These are consequences; the verdict names the cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.runtime.current_op import CurrentOp
from autopar.runtime.processes.watch.beat import (
    ALIVE,
    CUT,
    DEAD,
    ENDED,
    FAILED,
    RUNNING,
    STOPPED,
    TERMINATED,
    UNKNOWN,
    Beat,
)

# a rank that is not known to run counts as lost after so many seconds without a beat, and without progress of any rank
SILENCE = 20.0
GRACE = 3.0  # seconds that a rank whose connection broke waits for the cause to be found
HASTE = 1.5  # once a connection broke, a rank counts as lost after so many seconds without a beat

LOST = "was lost (killed or crashed)"
LONGER = "\n  if a rank may take that long (an evaluation, a checkpoint, a debugger), give a longer timeout="


@dataclass(frozen=True)
class RankState:
    """The state of one rank as another rank sees it. Seconds are those of the watching rank."""

    beat: Beat | None  # None: the rank has not begun
    process: str  # running, stopped, dead, unknown
    silent: float  # seconds since its newest beat came
    still: float  # seconds since it last made progress
    settled: float  # seconds since its state changed

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

    def state(self, now: float) -> RankState:
        return RankState(self.beat, self.process, now - self.came, now - self.moved, now - self.settled)


def _progress(place: CurrentOp) -> tuple[int, str]:
    """Return a value that changes while a rank makes progress. Outside of a step, nothing counts as progress."""
    return place.ticks, place.text if place.inside else ""


@dataclass(frozen=True)
class Verdict:
    """The ranks to blame, and the message for the user."""

    ranks: tuple[int, ...]
    text: str


def judge(states: Mapping[int, RankState], timeout: float) -> Verdict | None:
    """Return the verdict over a job, or ``None`` while nothing is wrong.

    Nothing is wrong while no rank is inside a step: ranks may load data or evaluate as long as they like.
    """
    for rank, s in states.items():
        if s.is_in(FAILED):
            return _raised(rank, states)
    dead = [rank for rank, s in states.items() if s.is_in(ALIVE) and s.process == DEAD]
    if dead:
        return _lost(dead, states)
    # if the whole job was terminated, all ranks soon are
    ended = [rank for rank, s in states.items() if s.is_in(TERMINATED) and s.settled >= HASTE]
    if ended and any(s.is_in(ALIVE, CUT) for s in states.values()):
        return _lost(ended, states)
    cut = sorted((rank for rank, s in states.items() if s.is_in(CUT)), key=lambda rank: -states[rank].settled)
    if cut:
        settled = states[cut[0]].settled
        silent = [rank for rank, s in states.items() if s.is_in(ALIVE) and s.silent >= HASTE and s.process != RUNNING]
        if settled >= GRACE or (settled >= HASTE and not silent and any(s.is_in(ENDED) for s in states.values())):
            return _lost(silent, states) if silent else _ended(states, cut) or _raised(cut[0], states)
    if len(states) < 2 or not any(s.inside for s in states.values()):
        return None
    still = min(s.still for s in states.values() if s.is_in(ALIVE))
    silence = min(timeout, SILENCE)
    silent = [rank for rank, s in states.items() if s.is_in(ALIVE) and s.silent >= silence and s.process != RUNNING]
    stopped = [rank for rank, s in states.items() if s.is_in(ALIVE) and s.process == STOPPED]
    if silent and still >= silence:
        return _lost(silent, states)
    if still >= timeout:
        if stopped:
            return _lost(stopped, states)
        alive = [rank for rank, s in states.items() if s.is_in(ALIVE)]
        waiting = [rank for rank in alive if states[rank].inside]
        return (_ended(states, waiting) if waiting == alive else None) or _stalled(states, timeout)
    return None


def _raised(rank: int, states: Mapping[int, RankState]) -> Verdict:
    beat = _beat(states, rank)
    return failed(rank, beat.place, beat.error)


def last_seen(beat: Beat) -> str:
    return f"it was last seen {at(beat.place)}"


def failed(rank: int, place: CurrentOp, error: str) -> Verdict:
    """Return the verdict over a rank that raised an exception."""
    if error.startswith("KeyboardInterrupt"):
        return Verdict((rank,), f"autopar: rank {rank} was interrupted {at(place)}")
    return Verdict((rank,), f"autopar: rank {rank} failed {at(place)}: {error}")


def _lost(ranks: Sequence[int], states: Mapping[int, RankState]) -> Verdict:
    parts = []
    for rank in ranks:
        cause = "was ended by SIGTERM" if states[rank].is_in(TERMINATED) else LOST
        if states[rank].process == STOPPED:
            cause = "was stopped (SIGSTOP)"
        elif states[rank].process != DEAD and not states[rank].is_in(TERMINATED):
            cause = f"has given no sign of life for {states[rank].silent:.0f} s (its process or its host is lost)"
        parts.append(f"rank {rank} {cause}; {last_seen(_beat(states, rank))}")
    waiting = _by_activity(states, [rank for rank, s in states.items() if rank not in ranks and s.inside])
    parts += [_listed(waiting)] if waiting else []
    remedy = (
        ""
        if any(states[rank].process == STOPPED or states[rank].is_in(TERMINATED) for rank in ranks)
        else "\n  if memory ran out, the kernel killed it: see dmesg"
    )
    return Verdict(tuple(ranks), "autopar: " + "; ".join(parts) + remedy)


def _ended(states: Mapping[int, RankState], waiting: Sequence[int]) -> Verdict | None:
    ended = [rank for rank, s in states.items() if s.is_in(ENDED)]
    if not ended:
        return None
    return Verdict(
        tuple(ended),
        f"autopar: {_ranks(ended)} ended; {_listed(_by_activity(states, waiting))}\n  all ranks must take the same "
        f"number of steps: see how the data is split",
    )


def _stalled(states: Mapping[int, RankState], timeout: float) -> Verdict:
    """Blame the ranks outside of any step; without such ranks, those that are not where most ranks are."""
    inside = _by_activity(states, [rank for rank, s in states.items() if s.inside])
    inside.sort(key=lambda item: (len(item[1]), min(_beat(states, rank).place.ticks for rank in item[1])))
    outside = _by_activity(states, [rank for rank, s in states.items() if not s.inside])
    groups = [ranks for _, ranks in outside]
    if not groups and len(inside) > 1:  # the largest group waits; the other groups are to blame
        groups = [ranks for _, ranks in inside[:-1]]
        inside[:-1] = [(replace(doing, one="is", many="are"), ranks) for doing, ranks in inside[:-1]]
    blamed = sorted(rank for ranks in groups for rank in ranks) or list(states)
    return Verdict(tuple(blamed), f"autopar: no progress for {timeout:g} s: {_listed(outside + inside)}{LONGER}")


@dataclass(frozen=True)
class _Activity:
    """The activity of a rank, in words for one rank and for several."""

    one: str
    many: str
    place: str = ""


def _activity(state: RankState) -> _Activity:
    beat = state.beat
    if beat is None:
        return _Activity("has not begun", "have not begun")
    if beat.state == ENDED:
        return _Activity("has ended", "have ended")
    place = " " + at(beat.place)
    if state.silent >= GRACE:
        return _Activity("is silent, last seen", "are silent, last seen", place)
    return (
        _Activity("waits", "wait", place)
        if beat.place.inside
        else _Activity("is outside of a step,", "are outside of a step,", place)
    )


def _by_activity(states: Mapping[int, RankState], ranks: Sequence[int]) -> list[tuple[_Activity, list[int]]]:
    groups: dict[_Activity, list[int]] = {}
    for rank in ranks:
        groups.setdefault(_activity(states[rank]), []).append(rank)
    return list(groups.items())


def _listed(groups: Sequence[tuple[_Activity, Sequence[int]]]) -> str:
    return "; ".join(
        f"{_ranks(ranks)} {doing.many if len(ranks) > 1 else doing.one}{doing.place}" for doing, ranks in groups
    )


def at(place: CurrentOp) -> str:
    return f"{'in' if place.inside else 'at'} {place.text}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = " ".join(str(rank) for rank in ranks[:16]) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {shown}"


def _beat(states: Mapping[int, RankState], rank: int) -> Beat:
    beat = states[rank].beat
    assert beat is not None
    return beat
