"""Optimised schedules: within the limit, no slower than the policies, and told where there is none."""

from __future__ import annotations

import re
from importlib import import_module
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optimised_schedules import FIXED
from stage_times import times_of

from autopar.errors import ScheduleError
from autopar.pipeline import build
from autopar.pipeline.bounds import costs
from autopar.pipeline.memory import Sizes, memory
from autopar.pipeline.optimiser import optimise
from autopar.pipeline.optimiser.greedy import PriorityRule
from autopar.pipeline.optimiser.orders import Paper
from autopar.pipeline.optimiser.search import with_joined_backwards
from autopar.pipeline.policies import loop, vee
from autopar.pipeline.simulate import Times, simulate


@pytest.mark.long
@settings(deadline=None, max_examples=10)
@given(st.data())
def test_it_is_right_within_the_limit_and_no_slower_than_what_is_fixed(data: st.DataObject) -> None:
    ranks, batches, chunks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6)), data.draw(st.integers(1, 2))
    times = data.draw(times_of(ranks * chunks))
    sizes = Sizes(
        1,
        data.draw(st.sampled_from([None, 0.5])),
        data.draw(st.sampled_from([0, 0, 0.25])),
        data.draw(st.sampled_from([0, 2])),
    )
    limit = data.draw(
        st.none() | st.lists(st.integers(4 + 4 * chunks, 30).map(lambda one: one / 2), min_size=ranks, max_size=ranks)
    )
    if limit is not None:
        limit = [one + chunks * sizes.fixed for one in limit]
    try:
        found = optimise(times, ranks, batches, chunks=chunks, sizes=sizes, limit=limit, tries=10)
    except ScheduleError as error:
        assert sizes.boundary, error  # without buffers one micro-batch after the other always is within these
        return
    schedule = found.schedule
    schedule.verify()
    assert (schedule.name, schedule.batches, schedule.ranks, schedule.stages) == (
        "optimised",
        batches,
        ranks,
        ranks * chunks,
    )
    assert found.bound <= found.makespan == simulate(schedule, times).makespan
    assert found.ratio >= 1
    inside = limit or [inf] * ranks
    assert all(used <= most * (1 + 1e-9) for used, most in zip(memory(schedule, sizes).peak, inside, strict=True))
    for name, number in FIXED:
        if number == chunks:
            other = simulate(build(name, ranks, batches, chunks), times, sizes)
            if all(used <= most for used, most in zip(other.peak, inside, strict=True)):
                assert found.best_fixed is not None
                assert found.makespan <= found.best_fixed[1] * (1 + 1e-9) <= other.makespan * (1 + 2e-9)
    again = optimise(times, ranks, batches, chunks=chunks, sizes=sizes, limit=limit, tries=10)
    assert again.schedule == schedule


UNEVEN = Times([8.0, 11.0, 9.0, 13.0], [9.0, 10.0, 12.0, 12.0], [5.0, 6.0, 4.0, 8.0], 3.0)


HEAD = Times([10.0, 10.0, 10.0, 15.0], [10.0, 10.0, 10.0, 15.0], [6.0, 6.0, 6.0, 9.0], 3.0)


@pytest.mark.parametrize(
    ("times", "limit", "fixed", "makespan", "bound"),
    [
        (Times(), 4, ("zb-h1", 27), 27, 27),  # what is best already stays
        (Times(10, 10, 6, 3), 6, ("zb-h1", 286), 256, 256),  # between the memory of ZB-H1 and of ZB-H2
        (Times(10, 10, 6, 3), [6, 5, 5, 3], ("1f1b", 334), 274, 274),
        (HEAD, 5, ("zb-h1", 360), 351, 351),  # the head of the model on the last stage
        (UNEVEN, 4, ("zb-h1", 318), 314, 314),  # in the memory of 1F1B
        (UNEVEN, 5, ("zb-h1", 318), 306, 306),
        (UNEVEN, 3, None, 348, 329),  # in less than any policy needs
    ],
)  # fmt: skip
def test_it_is_faster_where_no_policy_is_made_for_the_times_or_the_limit(
    times: Times, limit: float | list[float], fixed: tuple[str, float] | None, makespan: float, bound: float
) -> None:
    found = optimise(times, 4, 8, limit=limit)
    assert (found.best_fixed, found.makespan, found.bound) == (fixed, makespan, bound)
    found.schedule.verify()


def test_of_equals_it_takes_the_one_that_keeps_no_rank_for_long() -> None:
    times = Times(29.802, 29.428, 19.53, 0.577)
    found, fixed = optimise(times, 8, 32, limit=15), simulate(build("zb-h2", 8, 32), times)
    assert found.makespan == pytest.approx(fixed.makespan)
    assert found.simulation.span == pytest.approx(fixed.span)


def test_it_leaves_backwards_whole_where_splitting_them_is_for_nothing() -> None:
    whole = optimise(Times([10.0, 15.0], 20, 0, 3), 2, 5, limit=2).schedule
    assert not any(task.kind == "WW" for _, _, task in whole.tasks())
    orders = [[0, 1, 2, 0, 1, 2], [4, 5, 6, 4, 5, 6]]
    paper = Paper(costs(Times(), (0, 1)), 2)
    assert with_joined_backwards(orders, paper) == [[0, 3, 0, 3], orders[1]]  # what the second rank sends is waited for
    assert with_joined_backwards([[0, 0, 1, 1, 2, 2], orders[1]], paper)[0] == [0, 0, 1, 1, 2, 2]


@pytest.mark.long
def test_buffers_of_messages_count() -> None:
    """The same limit is met where messages are nothing with more micro-batches under way, and so sooner."""
    times, limit = Times(10, 10, 6, 3), 6.5
    without, within = (
        optimise(times, 4, 8, sizes=Sizes(boundary=boundary, fixed=0.5), limit=limit) for boundary in (0, 0.25)
    )
    assert without.makespan < within.makespan
    assert max(memory(without.schedule, Sizes(boundary=0.25, fixed=0.5)).peak) > limit >= max(within.simulation.peak)


@pytest.mark.long
@pytest.mark.parametrize(
    "limits",
    [
        (10.5, 14.5),
        pytest.param((10.5, 12.5, 14.5, 18.5), marks=pytest.mark.sweep("two limits show the order of the makespans")),
    ],
)
def test_more_memory_is_not_worse_and_messages_take_little_of_it(limits: tuple[float, ...]) -> None:
    times = Times(18.522, 18.086, 9.337, 0.601)
    without, within = (
        [optimise(times, 8, 16, sizes=Sizes(boundary=one), limit=limit, tries=30).makespan for limit in limits]
        for one in (0.0, 0.1)
    )
    assert within == sorted(within, reverse=True)
    assert all(one <= 1.011 * least for one, least in zip(within, without, strict=True))


@pytest.mark.long
def test_the_search_of_a_large_schedule_tries_fewer_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[PriorityRule] = []
    search = import_module("autopar.pipeline.optimiser.search")
    monkeypatch.setattr(search, "follow", lambda rule, *_: tried.append(rule))
    monkeypatch.setattr(search, "MOVES", 0)
    optimise(Times(2, 2, 1, 0.1), 16, 48, chunks=2, sizes=Sizes(boundary=0.02), limit=80)
    assert 0 < len(tried) <= 400


def test_a_placement_that_does_not_fit_leaves_the_other() -> None:
    found = optimise(Times(), 2, 1, chunks=2, sizes=Sizes([2.0, 1.0, 1.0, 2.0]), limit=3)
    assert (found.schedule.rank_of, found.simulation.peak) == (loop(2, 2), (3, 3))


def test_numbers_may_be_numpys() -> None:
    found = optimise(
        UNEVEN,
        np.int64(4),
        np.int32(8),
        chunks=np.int8(1),
        limit=np.array([5, 5, 4, 4]),
        tries=np.int64(50),
        seed=np.int64(1),
    )
    assert found == optimise(UNEVEN, 4, 8, limit=(5, 5, 4, 4), tries=50, seed=1)
    assert optimise(UNEVEN, 4, 8, limit=np.float32(5), tries=5) == optimise(UNEVEN, 4, 8, limit=5, tries=5)


@pytest.mark.simulated
def test_with_two_stages_a_rank_the_placement_is_chosen() -> None:
    free = optimise(Times(), 4, 8, chunks=2)
    assert free.schedule.rank_of == vee(4, 2)
    assert free.ratio == 1
    # The loop sends what the V has on one rank already, from the fourth stage to the fifth.
    assert optimise(
        Times(transfer=[0.0, 0.0, 0.0, 9.0, 0.0, 0.0, 0.0]), 4, 4, chunks=2, limit=8, tries=50
    ).schedule.rank_of == vee(4, 2)
    # The loop has the two long stages on different ranks, the V on one.
    long = Times([1.0, 8.0, 8.0, 1.0], [1.0, 8.0, 8.0, 1.0], [1.0, 8.0, 8.0, 1.0])
    assert optimise(long, 2, 4, chunks=2, tries=50).schedule.rank_of == loop(2, 2)


@pytest.mark.simulated
def test_text() -> None:
    assert (
        str(optimise(HEAD, 4, 8, limit=[5, 5, 5, 8]))
        == """\
optimised: 4 ranks, 8 micro-batches
  makespan     351
  bubble       39, 11.1% of the makespan
  lower bound  351
  ratio        1.0000, so nothing is faster
  best fixed   zb-h1: 360, 1.026 times as long
  peak memory  5 5 5 8  of  5 5 5 8"""
    )
    assert (
        str(optimise(Times(2, 1, 1, 1), 2, 2, chunks=2, limit=2))
        == """\
optimised: 2 ranks, 2 micro-batches, 2 stages a rank: 0 1 1 0
  makespan     30
  bubble       14, 46.7% of the makespan
  lower bound  26
  ratio        1.1538
  best fixed   none is within the limit
  peak memory  2 2  of  2 2"""
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"limit": 0.5},
            "no schedule keeps within limit=0.5 on rank 0: one micro-batch alone needs 1 there (1 of activations); "
            "raise the limit to that, or make micro-batches or stages smaller",
        ),
        (
            {"limit": [9, 3, 9], "sizes": Sizes(1, None, 0.25, 2), "chunks": 2},
            "limit=3 on rank 1: one micro-batch alone needs 6.5 there (2 of activations, 0.5 of messages, 4 fixed)",
        ),
        ({"limit": [1, 2]}, "limit has 2 numbers, but there are 3 ranks"),
        ({"limit": -1}, "limit is -1.0; it must be a number from 0, or None for no limit"),
        ({"ranks": 0}, "optimise: ranks=0; there is at least one"),
        ({"tries": -1}, "optimise: tries=-1; the number of rules to try must be at least 0"),
        ({"times": Times([1.0, 2.0])}, "forward has 2 numbers, and there are 3"),
    ],
)
def test_errors(arguments: dict, text: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(text)):
        optimise(**{"times": Times(), "ranks": 3, "batches": 4, **arguments})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batches": 2.5}, "optimise: batches is a whole number, not 2.5"),
        ({"ranks": 4.0}, "optimise: ranks is a whole number, not 4.0"),
        ({"chunks": True}, "optimise: chunks is a whole number, not True"),
        ({"tries": "9"}, "optimise: tries is a whole number, not '9'"),
        ({"seed": None}, "optimise: seed is a whole number, not None"),
        ({"times": 3}, "optimise: times is a Times, not 3"),
        ({"sizes": 3}, "optimise: sizes is a Sizes, not 3"),
        (
            {"limit": "333"},
            "optimise: limit must be a number, one number for each rank, or None for no limit, not '333'",
        ),
        ({"limit": True}, "optimise: limit must be a number, one number for each rank, or None for no limit, not True"),
        (
            {"limit": [None, 3, 3]},
            "optimise: limit must be a number, one number for each rank, or None for no limit, not [None, 3, 3]",
        ),
    ],
)
def test_other_types(arguments: dict, text: str) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        optimise(**{"times": Times(), "ranks": 3, "batches": 4, **arguments})


@pytest.mark.long
def test_a_limit_within_which_nothing_is_found_is_told_with_one_that_will_do() -> None:
    sizes = Sizes(1, 0.5, [2.0, 0.0, 0.0])
    with pytest.raises(
        ScheduleError,
        match="nothing was found within limit=2; the smallest schedule found needs 4, optimised: raise the limit to "
        "that",
    ):
        optimise(Times(), 2, 3, chunks=2, sizes=sizes, limit=2)
    assert max(optimise(Times(), 2, 3, chunks=2, sizes=sizes, limit=4).simulation.peak) <= 4
