"""Word what ranks are doing: ranks that do the same share a clause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.runtime.current_op import CurrentOp
from autopar.runtime.processes.watch.beat import ENDED, Beat
from autopar.runtime.processes.watch.followed_rank import RankState

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
