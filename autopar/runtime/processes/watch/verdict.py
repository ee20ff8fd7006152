"""Decide which rank is to blame, as a pure function of the beats of all ranks.

When one rank fails, the others soon fail too, or wait forever. These are consequences; the verdict names the cause. If
no rank makes progress, it follows the waits (``waits``). Where no rank says whom it waits for, those that are not where
most ranks are count as the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

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
    Beat,
    RankState,
)
from autopar.runtime.processes.watch.waits import Waits
from autopar.runtime.processes.watch.wording import (
    IS,
    WAITS,
    HostNames,
    at,
    clauses,
    in_words,
    joined,
    last_seen,
    lines,
)

# a rank that is not known to run counts as lost after so many seconds without a beat, and without progress of any rank
SILENCE = 20.0
UNREACHABLE = 10.0  # wherever the ranks are, a rank counts as lost after so many seconds if its host's kernel is silent
GRACE = 3.0  # seconds that a rank whose connection broke waits for the cause to be found
HASTE = 1.5  # once a connection broke, a rank counts as lost after so many seconds without a beat

LOST = "was lost (killed or crashed)"
LONGER = "\n  if a rank may take that long (an evaluation, a checkpoint, a debugger), give a longer timeout="
LOST_HOST = "\n  see whether that host is up, and whether the hosts reach each other (ping)"
ORDER = "\n  let all ranks come to these calls in one order"  # where no time-out is long enough


@dataclass(frozen=True)
class Verdict:
    """The ranks to blame, the message for the user, and whether it is about an error that such a rank has raised."""

    ranks: tuple[int, ...]
    text: str
    raised: bool = False


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
    silent = [rank for rank, s in states.items() if s.is_in(ALIVE) and s.unreachable and s.silent >= HASTE]
    if any(states[rank].silent >= UNREACHABLE for rank in silent):  # the last beats of a host came one by one
        return _lost(silent, states)
    # ranks that save a checkpoint wait for each other outside of a step
    stopped = [rank for rank, s in states.items() if s.is_in(ALIVE) and s.process == STOPPED and s.silent >= SILENCE]
    if stopped:
        return _lost(stopped, states)
    cut = sorted((rank for rank, s in states.items() if s.is_in(CUT)), key=lambda rank: -states[rank].settled)
    if cut:
        settled = states[cut[0]].settled
        silent = [rank for rank, s in states.items() if s.is_in(ALIVE) and s.silent >= HASTE and s.process != RUNNING]
        if settled >= GRACE or (settled >= HASTE and not silent and any(s.is_in(ENDED) for s in states.values())):
            ended = [rank for rank, s in states.items() if s.is_in(ENDED)]
            if silent:
                return _lost(silent, states)
            return _ended(states, ended, cut) if ended else _raised(cut[0], states)
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
        return _stalled(states, f"autopar: no progress for {timeout:g} s: ")
    return None


def _raised(rank: int, states: Mapping[int, RankState]) -> Verdict:
    beat = _beat(states, rank)
    return failed(rank, beat.place, beat.error, HostNames(states).named(rank))


def failed(rank: int, place: CurrentOp, error: str, name: str) -> Verdict:
    """Return the verdict over a rank that raised an exception. ``name``: of the rank, with its host."""
    if error.startswith("KeyboardInterrupt"):
        return Verdict((rank,), f"autopar: {name} was interrupted {at(place)}", True)
    return Verdict((rank,), f"autopar: {name} failed {at(place)}: {error}", True)


def _lost(ranks: Sequence[int], states: Mapping[int, RankState]) -> Verdict:
    names = HostNames(states)
    silent = [rank for rank in ranks if states[rank].process not in (STOPPED, DEAD) and states[rank].is_in(ALIVE)]
    hosts = names.whole(silent)
    parts = [_lost_host(host, own, states, names) for host, own in hosts.items()]
    apart = [rank for rank in ranks if not any(rank in own for own in hosts.values())]
    for rank in apart:
        cause = "was ended by SIGTERM" if states[rank].is_in(TERMINATED) else LOST
        if states[rank].process == STOPPED:
            cause = "was stopped (SIGSTOP)"
        elif states[rank].process != DEAD and not states[rank].is_in(TERMINATED):
            cause = f"has given no sign of life for {states[rank].silent:.0f} s (its process or its host is lost)"
        parts.append(f"{names.named(rank)} {cause}; {last_seen(_beat(states, rank))}")
    waits = _waits(states, ranks)
    waiting = [rank for rank, s in states.items() if rank not in ranks and s.inside]
    waiting = list(dict.fromkeys([*(rank for rank in waits.outwards(ranks) if rank in waiting), *waiting]))
    remedy = (
        LOST_HOST
        if hosts
        else ""
        if any(states[rank].process == STOPPED or states[rank].is_in(TERMINATED) for rank in ranks)
        else "\n  if memory ran out, the kernel killed it: see dmesg"
    )
    told = joined(parts, clauses(states, waiting, alone=IS if waits.known else WAITS))
    return Verdict(tuple(ranks), f"autopar: {told}{remedy}")


def _lost_host(host: str, ranks: Sequence[int], states: Mapping[int, RankState], names: HostNames) -> str:
    """Return the clause of a host all of whose ranks are silent. It shows the rank that has come least far."""
    last = min(ranks, key=lambda rank: (_beat(states, rank).place.ticks, rank))
    seconds = min(states[rank].silent for rank in ranks)
    return (
        f"{names.with_ranks(host)} has given no sign of life for {seconds:.0f} s: its network or the host is lost; "
        f"rank {last} was last seen {at(_beat(states, last).place)}"
    )


def _ended(states: Mapping[int, RankState], ended: Sequence[int], waiting: Sequence[int]) -> Verdict:
    told = joined([f"{in_words(ended)} ended"], clauses(states, waiting))
    return Verdict(
        tuple(ended), f"autopar: {told}\n  all ranks must take the same number of steps: see how the data is split"
    )


# -- no rank makes progress --------------------------------------------------------------------------------------------


def _stalled(states: Mapping[int, RankState], begin: str) -> Verdict:
    """Blame the ranks to which waits lead, or those that wait for each other. ``begin``: of the message."""
    waits = _waits(states)
    if not waits.known:
        return _outvoted(states, begin)
    if waits.apart:
        return _mismatched(states, waits, begin)
    if waits.cycle:
        return _circular(states, waits, begin)
    blamed, led = waits.ends, waits.outwards(waits.ends)
    if all(states[rank].is_in(ENDED) for rank in blamed):
        return _ended(states, blamed, led)
    told = joined(clauses(states, blamed, alone=IS), clauses(states, [*led, *_rest(states, blamed, led)], alone=IS))
    return Verdict(tuple(blamed), f"{begin}{told}{LONGER}")


def _mismatched(states: Mapping[int, RankState], waits: Waits, begin: str) -> Verdict:
    """Blame the ranks of a group that are not in the collective in which most of its ranks are."""
    fewer, most = _by_place(states, waits.apart, lambda place: place.collective)
    blamed = sorted(fewer)
    led = waits.outwards(waits.apart)
    told = joined(
        clauses(states, blamed, together=IS), clauses(states, [*most, *led, *_rest(states, waits.apart, led)], alone=IS)
    )
    return Verdict(tuple(blamed), f"{begin}{told}{ORDER}")


def _circular(states: Mapping[int, RankState], waits: Waits, begin: str) -> Verdict:
    """Blame the ranks of a cycle of waits."""
    cycle, led = waits.cycle, waits.outwards(waits.cycle)
    told = [
        f"rank {rank} waits for rank {peer} {at(_beat(states, rank).place)}"
        for rank, peer in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    ]
    told += clauses(states, [*led, *_rest(states, cycle, led)], alone=IS)
    return Verdict(tuple(cycle), f"{begin}{in_words(sorted(cycle))} wait for each other{lines(told)}{ORDER}")


def _outvoted(states: Mapping[int, RankState], begin: str) -> Verdict:
    """Blame the ranks outside of any step; without such ranks, those that are not where most ranks are."""
    inside = [rank for rank, s in states.items() if s.inside]
    outside = _rest(states, inside)
    if all(not states[rank].is_in(ALIVE) for rank in outside):
        ended = [rank for rank in outside if states[rank].is_in(ENDED)]
        if ended:
            return _ended(states, ended, inside)
    if outside:
        return Verdict(tuple(outside), f"{begin}{joined(clauses(states, outside), clauses(states, inside))}{LONGER}")
    blamed, most = _by_place(states, inside, lambda place: place.text)
    told = joined(clauses(states, blamed, alone=IS), clauses(states, most))
    return Verdict(tuple(sorted(blamed or states)), f"{begin}{told}{LONGER}")


def _waits(states: Mapping[int, RankState], lost: Sequence[int] = ()) -> Waits:
    """Return the waits of the ranks that are not lost."""
    inside = [rank for rank, s in states.items() if s.inside and rank not in lost]
    return Waits({rank: _beat(states, rank).place for rank in inside}, states)


def _rest(states: Mapping[int, RankState], *others: Sequence[int]) -> list[int]:
    named = {rank for ranks in others for rank in ranks}
    return [rank for rank in states if rank not in named]


def _by_place(
    states: Mapping[int, RankState], ranks: Iterable[int], name: Callable[[CurrentOp], str]
) -> tuple[list[int], list[int]]:
    """Return the ranks that are not where most of them are, and those that are; of equally many, who has come far."""
    places: dict[str, list[int]] = {}
    for rank in ranks:
        places.setdefault(name(_beat(states, rank).place), []).append(rank)
    *fewer, most = sorted(
        places.values(), key=lambda own: (len(own), min(_beat(states, rank).place.ticks for rank in own))
    )
    return [rank for own in fewer for rank in own], most


def _beat(states: Mapping[int, RankState], rank: int) -> Beat:
    beat = states[rank].beat
    assert beat is not None
    return beat
