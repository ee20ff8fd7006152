"""The verdict of the watch over ranks that wait for each other: beats are made up, and the texts are compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.runtime.current_op import CurrentOp
from autopar.runtime.processes.watch.beat import (
    ALIVE,
    CUT,
    DEAD,
    ENDED,
    FAILED,
    RUNNING,
    STOPPED,
    UNKNOWN,
    Beat,
    Process,
    RankState,
)
from autopar.runtime.processes.watch.verdict import LONGER, ORDER, judge
from autopar.runtime.processes.watch.wording import LINES

TIMEOUT = 60.0
NEW = RankState(None, UNKNOWN, 500.0, 500.0, 500.0)
OUTSIDE = CurrentOp(9, False, "train.py:7  load()")
COMPUTES = CurrentOp(9, True, "BW01 of stage 2 (micro-batch 1): mm_12 = mm(t, x)   model.py:41")


def receives(*peers: int, slot: str = "FW03 of stage 0 (micro-batch 3)") -> CurrentOp:
    return CurrentOp(9, True, f"{slot}: from {' '.join(map(str, peers))}", peers)


def reduces(name: str, *peers: int, ticks: int = 9) -> CurrentOp:
    return CurrentOp(ticks, True, f"BW01 of stage 1: {name} = all_reduce(mm, tp)", peers, f"BW01 of stage 1: {name}")


def seen(place: CurrentOp, state: str = ALIVE, process: str = RUNNING, still: float = TIMEOUT + 1) -> RankState:
    """A rank that has been in a place for a long time."""
    beat = Beat(1, state, place, Process("elsewhere", 1, ""), "ValueError: no" if state == FAILED else "")
    return RankState(beat, process, 0.1, still, 50.0)


def stuck(*places: CurrentOp | RankState) -> dict[int, RankState]:
    return {k: place if isinstance(place, RankState) else seen(place) for k, place in enumerate(places)}


# all ranks are in different slots, and three wait along a chain: 0 → 1 → 2 ← 3
ALONG = (receives(1), receives(2, slot="FW02 of stage 1"), COMPUTES, receives(2, slot="BW00 of stage 3"))
CHAIN = (
    "rank 1 waits for rank 2 in FW02 of stage 1: from 2",
    "rank 3 waits for rank 2 in BW00 of stage 3: from 2",
    "rank 0 waits for rank 1 in FW03 of stage 0 (micro-batch 3): from 1",
)
REMEDY_DEAD = "if memory ran out, the kernel killed it: see dmesg"
STEPS = "all ranks must take the same number of steps: see how the data is split"
ONE_ORDER, LONG = ORDER.strip(), LONGER.strip()
STALLED = f"no progress for {TIMEOUT:g} s:"

# case → the states of the ranks, the ranks to blame, and the lines of the message
CASES: dict[str, tuple[dict[int, RankState], tuple[int, ...], tuple[str, ...]]] = {
    "computes": (stuck(*ALONG), (2,), (f"{STALLED} rank 2 is in {COMPUTES.text}", *CHAIN, LONG)),
    "dead": (
        stuck(*ALONG[:2], seen(COMPUTES, process=DEAD), ALONG[3]),
        (2,),
        (f"rank 2 was lost (killed or crashed); it was last seen in {COMPUTES.text}", *CHAIN, REMEDY_DEAD),
    ),
    "dead in a wait": (
        stuck(*ALONG[:2], seen(receives(3), process=DEAD), ALONG[3]),
        (2,),
        (f"rank 2 was lost (killed or crashed); it was last seen in {receives(3).text}", *CHAIN, REMEDY_DEAD),
    ),
    "dead in a collective": (
        stuck(receives(1), reduces("a", 2), seen(reduces("a", 1), process=DEAD), COMPUTES),
        (2,),
        (
            f"rank 2 was lost (killed or crashed); it was last seen in {reduces('a').text}",
            f"rank 1 waits in {reduces('a').text}",
            f"rank 0 waits for rank 1 in {receives(1).text}",
            f"rank 3 is in {COMPUTES.text}",
            REMEDY_DEAD,
        ),
    ),
    "stopped": (
        stuck(*ALONG[:2], seen(COMPUTES, process=STOPPED), ALONG[3]),
        (2,),
        (f"rank 2 was stopped (SIGSTOP); it was last seen in {COMPUTES.text}", *CHAIN),
    ),
    "failed": (
        stuck(*ALONG[:2], seen(COMPUTES, FAILED), ALONG[3]),
        (2,),
        (f"rank 2 failed in {COMPUTES.text}: ValueError: no",),
    ),
    "left the step": (
        stuck(*ALONG[:2], OUTSIDE, ALONG[3]),
        (2,),
        (f"{STALLED} rank 2 is outside of a step, at train.py:7  load()", *CHAIN, LONG),
    ),
    "ended": (stuck(*ALONG[:2], seen(OUTSIDE, ENDED, DEAD), ALONG[3]), (2,), ("rank 2 ended", *CHAIN, STEPS)),
    "has not begun": (stuck(*ALONG[:2], NEW, ALONG[3]), (2,), (f"{STALLED} rank 2 has not begun", *CHAIN, LONG)),
    "two hold up others": (
        stuck(receives(1), COMPUTES, receives(3), OUTSIDE),
        (1, 3),
        (
            f"{STALLED} rank 1 is in {COMPUTES.text}",
            "rank 3 is outside of a step, at train.py:7  load()",
            f"rank 0 waits for rank 1 in {receives(1).text}",
            f"rank 2 waits for rank 3 in {receives(3).text}",
            LONG,
        ),
    ),
    "most hold up one": (
        stuck(COMPUTES, COMPUTES, COMPUTES, reduces("mm_tp", 0, 1, 2)),
        (0, 1, 2),
        (f"{STALLED} ranks 0 1 2 are in {COMPUTES.text}; rank 3 waits in {reduces('mm_tp').text}", LONG),
    ),
    "nobody waits for one that is outside": (
        stuck(receives(1), COMPUTES, OUTSIDE),
        (1,),
        (
            f"{STALLED} rank 1 is in {COMPUTES.text}; rank 0 waits for rank 1 in {receives(1).text}; rank 2 is outside "
            f"of a step, at train.py:7  load()",
            LONG,
        ),
    ),
    "one of several peers": (
        stuck(receives(1, 2), receives(0), COMPUTES),
        (2,),
        (
            f"{STALLED} rank 2 is in {COMPUTES.text}; rank 0 waits for ranks 1 2 in {receives(1, 2).text}; rank 1 "
            f"waits for rank 0 in {receives(0).text}",
            LONG,
        ),
    ),
    "cycle": (
        stuck(receives(1), receives(2), receives(3), receives(1)),
        (1, 2, 3),
        (
            f"{STALLED} ranks 1 2 3 wait for each other",
            f"rank 1 waits for rank 2 in {receives(2).text}",
            f"rank 2 waits for rank 3 in {receives(3).text}",
            f"rank 3 waits for rank 1 in {receives(1).text}",
            f"rank 0 waits for rank 1 in {receives(1).text}",
            ONE_ORDER,
        ),
    ),
    "a cycle through a collective": (
        stuck(reduces("a", 1, 2), reduces("a", 0, 2), receives(0)),
        (0, 2),
        (
            f"{STALLED} ranks 0 2 wait for each other",
            f"rank 0 waits for rank 2 in {reduces('a').text}",
            f"rank 2 waits for rank 0 in {receives(0).text}",
            f"rank 1 waits in {reduces('a').text}",
            ONE_ORDER,
        ),
    ),
    "a cycle, and one outside": (
        stuck(receives(1), receives(0), receives(3), OUTSIDE),
        (0, 1),
        (
            f"{STALLED} ranks 0 1 wait for each other",
            f"rank 0 waits for rank 1 in {receives(1).text}",
            f"rank 1 waits for rank 0 in {receives(0).text}",
            f"rank 2 waits for rank 3 in {receives(3).text}",
            "rank 3 is outside of a step, at train.py:7  load()",
            ONE_ORDER,
        ),
    ),
    "collectives of two axes in a circle": (
        stuck(reduces("a", 1), reduces("b", 2), reduces("a", 3), reduces("b", 0)),
        (0, 1, 2, 3),
        (
            f"{STALLED} ranks 0 1 2 3 wait for each other",
            f"rank 0 waits for rank 1 in {reduces('a').text}",
            f"rank 1 waits for rank 2 in {reduces('b').text}",
            f"rank 2 waits for rank 3 in {reduces('a').text}",
            f"rank 3 waits for rank 0 in {reduces('b').text}",
            ONE_ORDER,
        ),
    ),
    "other collectives inside of a stage": (
        stuck(receives(2), receives(3), reduces("mm_tp", 3, ticks=8), reduces("mm_1_tp", 2)),
        (2,),
        (
            f"{STALLED} rank 2 is in {reduces('mm_tp').text}",
            f"rank 3 waits in {reduces('mm_1_tp').text}",
            f"rank 0 waits for rank 2 in {receives(2).text}",
            f"rank 1 waits for rank 3 in {receives(3).text}",
            ONE_ORDER,
        ),
    ),
    "most are in one collective": (
        stuck(reduces("a", 1, 2), reduces("b", 0, 2, ticks=20), reduces("a", 0, 1)),
        (1,),
        (f"{STALLED} rank 1 is in {reduces('b').text}; ranks 0 2 wait in {reduces('a').text}", ONE_ORDER),
    ),
    "all of a stage are in one collective": (
        stuck(receives(1), reduces("a", 2), reduces("a", 1)),
        (1, 2),
        (f"{STALLED} ranks 1 2 wait in {reduces('a').text}; rank 0 waits for rank 1 in {receives(1).text}", LONG),
    ),
    "pieces of unlike sizes": (
        stuck(reduces("a", 1), replace(reduces("a", 0), text="a, of another size"), seen(COMPUTES)),
        (0, 1),
        (f"{STALLED} rank 0 waits in {reduces('a').text}; rank 1 waits in a, of another size; rank 2 is in "
         f"{COMPUTES.text}", LONG),
    ),
    "cut while it waited": (
        stuck(receives(1), seen(receives(2), CUT), seen(COMPUTES, process=DEAD)),
        (2,),
        (
            f"rank 2 was lost (killed or crashed); it was last seen in {COMPUTES.text}; rank 0 waits for rank 1 in "
            f"{receives(1).text}",
            REMEDY_DEAD,
        ),
    ),
}  # fmt: skip


AT_ONCE = ("dead", "dead in a wait", "dead in a collective", "failed", "cut while it waited")


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_follows_the_waits(case: str) -> None:
    states, blamed, lines = CASES[case]
    verdict = judge(states, TIMEOUT)
    assert verdict is not None
    assert verdict.text.splitlines() == [f"autopar: {lines[0]}", *(f"  {line}" for line in lines[1:])]
    assert verdict.ranks == blamed
    assert verdict.raised == (case == "failed"), "whether the ranks to blame show their tracebacks"


@pytest.mark.parametrize("case", [case for case in CASES if case not in AT_ONCE])
def test_waits_are_borne_while_one_rank_makes_progress(case: str) -> None:
    states, _, _ = CASES[case]
    first = next(rank for rank, state in states.items() if state.is_in(ALIVE) and state.inside)
    assert judge({**states, first: replace(states[first], still=TIMEOUT - 1)}, TIMEOUT) is None


def test_a_long_chain_is_cut_short() -> None:
    states = {rank: seen(receives(rank + 1)) for rank in range(LINES + 5)}
    verdict = judge({**states, len(states): seen(COMPUTES)}, TIMEOUT)
    assert verdict is not None and verdict.ranks == (len(states),)
    lines = verdict.text.splitlines()
    assert len(lines) == 1 + LINES + 2
    assert lines[1] == f"  rank {LINES + 4} waits for rank {LINES + 5} in {receives(LINES + 5).text}", (
        "the nearest first"
    )
    assert lines[-2:] == ["  and 5 more", f"  {LONG}"]


def test_a_wait_for_a_rank_that_is_unknown_is_the_ranks_own() -> None:
    verdict = judge(stuck(receives(7), COMPUTES), TIMEOUT)
    assert verdict is not None and verdict.ranks == (0,)
