"""Optimised schedules and their bounds, against the shortest of all orders and against the policies."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from importlib import import_module
from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optimised_schedules import FIXED, words

from autopar.errors import ScheduleError
from autopar.pipeline import POLICIES, build
from autopar.pipeline.bounds import BOUNDS, costs, lower_bound
from autopar.pipeline.memory import Sizes, memory
from autopar.pipeline.optimiser import optimise
from autopar.pipeline.optimiser.greedy import PriorityRule, follow
from autopar.pipeline.optimiser.orders import Paper, orders_of, schedule_of
from autopar.pipeline.optimiser.peaks import Peaks
from autopar.pipeline.optimiser.search import grid_rules, with_joined_backwards
from autopar.pipeline.policies import loop, vee
from autopar.pipeline.simulate import Times, simulate


@st.composite
def times_of(draw: st.DrawFn, stages: int, most: int = 40) -> Times:
    """Times in eighths, whose sums are exact."""
    some = [[draw(st.integers(0, most)) / 8 for _ in range(stages)] for _ in range(3)]
    return Times(*some, [draw(st.integers(0, most // 2)) / 8 for _ in range(stages - 1)])


# -- all orders ------------------------------------------------------------------------------------------------------


def shortest(
    times: Times, rank_of: Sequence[int], batches: int, activation: float = 1.0, later: float = 1.0, limit: float = inf
) -> float:
    """The makespan of the fastest schedule: all ways to append tasks, where of those that did the same none is kept
    that is not earlier in anything. A state is when each rank and link is free, and when each message that is not read
    is there."""
    stages, ranks = len(rank_of), max(rank_of) + 1
    duration = (times.forward, times.backward, times.weight)
    free, links = tuple(range(ranks)), ranks
    layer = {(0,) * (3 * stages): [((0.0,) * (ranks + ranks * ranks), ((0.0,) * batches,) + ((),) * (2 * stages - 1))]}
    for _ in range(3 * stages * batches):
        following: dict = {}
        for done, states in layer.items():
            for stage, of in product(range(stages), range(3)):
                rank = rank_of[stage]
                n = done[3 * stage + of]
                if n == (batches if of == 0 else done[3 * stage + of - 1]):
                    continue
                mine = [3 * s for s in range(stages) if rank_of[s] == rank]
                used = sum((done[s] - done[s + 1]) * activation + (done[s + 1] - done[s + 2]) * later for s in mine)
                if of == 0 and used + activation > limit:
                    continue
                new = (*done[: 3 * stage + of], n + 1, *done[3 * stage + of + 1 :])
                for clocks, unread in states:
                    clocks, unread = list(clocks), list(unread)
                    here = of * stages + stage  # forwards first, then backwards
                    if of < 2:
                        if not unread[here]:
                            continue
                        clocks[rank] = max(clocks[rank], unread[here][0])
                        unread[here] = unread[here][1:]
                    clocks[rank] += duration[of][stage]
                    to = stage + 1 - 2 * of
                    if of == 0 and to == stages:
                        unread[stages + stage] += (clocks[rank],)
                    elif of < 2 and 0 <= to < stages:
                        arrival = clocks[rank]
                        if rank_of[to] != rank:
                            link = links + ranks * rank + rank_of[to]
                            arrival = clocks[link] = max(clocks[link], arrival) + times.transfer[min(stage, to)]
                        unread[of * stages + to] += (arrival,)
                    # What was there before its rank is free might as well come then.
                    unread = [
                        tuple(max(one, clocks[rank_of[i % stages]]) for one in own) for i, own in enumerate(unread)
                    ]
                    following.setdefault(new, set()).add((tuple(clocks), tuple(unread)))
        layer = {done: _earliest(states) for done, states in following.items()}
    return (
        min(max(clocks[rank] for rank in free) for states in layer.values() for clocks, _ in states) if layer else inf
    )


def _earliest(states: set) -> list:
    kept: list[tuple[tuple, tuple]] = []
    for state in sorted(states, key=lambda one: sum(_flat(one))):
        flat = _flat(state)
        if not any(all(a <= b for a, b in zip(other, flat, strict=True)) for other, _ in kept):
            kept.append((flat, state))
    return [state for _, state in kept]


def _flat(state: tuple) -> tuple[float, ...]:
    clocks, unread = state
    return (*clocks, *(one for own in unread for one in own))


@pytest.mark.simulated
@settings(deadline=None, max_examples=15)
@given(st.data())
def test_the_oracle_is_the_shortest_of_all_orders_simulated(data: st.DataObject) -> None:
    stages, batches = data.draw(st.sampled_from([(1, 3), (2, 2), (3, 2)]))
    times, limit = data.draw(times_of(stages)), data.draw(st.integers(1, 2))
    cost = costs(times, range(stages), None, [limit] * stages)
    paper = Paper(cost, batches)
    own = [[order for order in words(batches, stage) if paper.fits(order, stage)] for stage in range(stages)]
    spans = [
        schedule_of(list(orders), range(stages), batches, "").simulate(times).makespan
        for orders in product(*own)
        if paper.length(list(orders)) < inf
    ]
    assert shortest(times, range(stages), batches, limit=limit) == min(spans)


ONE_STAGE = [(1, 1, 1), (1, 3, 1), (2, 1, 1), (2, 2, 1), (2, 3, 1), (3, 1, 1), (3, 2, 1), (2, 5, 1), (3, 3, 1)]
TWO_STAGES = [(1, 2, 2), (2, 1, 2), (2, 2, 2)]
TINY = ONE_STAGE + TWO_STAGES


def tiny(draw: random.Random, cases: Sequence[tuple[int, int, int]]) -> tuple:
    """A small case, and the makespan of the fastest schedule for each placement."""
    ranks, batches, chunks = draw.choice(cases)
    stages = ranks * chunks
    times = Times(
        *([float(draw.randint(0, 9)) for _ in range(stages)] for _ in range(3)),
        [float(draw.randint(0, 4)) for _ in range(stages - 1)],
    )
    later, limit = draw.choice([1.0, 0.5, 0.0]), draw.choice([inf, *(chunks + one / 2 for one in range(4))])
    placements = {loop(ranks, chunks), vee(ranks, chunks)} if chunks == 2 else {loop(ranks, chunks)}
    optima = {rank_of: shortest(times, rank_of, batches, later=later, limit=limit) for rank_of in placements}
    return ranks, batches, chunks, times, Sizes(for_weights=later), limit, optima


@pytest.mark.simulated
@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False))
def test_nothing_is_below_the_bounds(choose: random.Random) -> None:
    ranks, batches, _, times, sizes, limit, optima = tiny(choose, TINY)
    for rank_of, optimum in optima.items():
        for name, bound in BOUNDS.items():
            assert bound(costs(times, rank_of, sizes, [limit] * ranks), batches) <= optimum * (1 + 1e-9), name


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("cases", "all_of", "shortest_of", "worst"), [(ONE_STAGE, 40, 39, 1.05), (TWO_STAGES, 12, 9, 1.15)]
)
def test_it_is_the_shortest_or_near(
    cases: Sequence[tuple[int, int, int]], all_of: int, shortest_of: int, worst: float
) -> None:
    choose, count = random.Random(0), 0
    for _ in range(all_of):
        ranks, batches, chunks, times, sizes, limit, optima = tiny(choose, cases)
        found = optimise(times, ranks, batches, chunks=chunks, sizes=sizes, limit=limit, tries=300)
        best = min(optima.values())
        assert best * (1 - 1e-9) <= found.makespan <= best * worst
        assert found.bound <= found.makespan == simulate(found.schedule, times).makespan
        count += found.makespan <= best * (1 + 1e-9)
    assert count >= shortest_of


@pytest.mark.parametrize(
    ("bound", "times", "rank_of", "batches", "later", "limit", "is_"),
    [
        # 1 x 3 before the last rank's first forward, and 8 micro-batches of 3
        ("work", Times(), (0, 1, 2, 3), 8, 1, 5, 27),
        # the first backward begins at 2 + 4; the rank computes 18 in all, of which memory for 2 lets 4 be before it
        ("first backward", Times([2.0, 4.0], [4.0, 0.0], [3.0, 0.0]), (0, 1), 2, 1, 2, 20),
        # one micro-batch after the other: 1 + 4 + 1
        ("round trips", Times([0.0, 1.0], [1.0, 4.0], 0), (0, 1), 2, 0.5, 1.5, 12),
        ("area", Times([1.0, 3.0, 0.0, 0.0], [0.0, 0.0, 2.0, 2.0], [0.0, 2.0, 3.0, 4.0], 2.0), (0, 1, 0, 1), 3, 0.5, 2,
         44.25),
    ],
)  # fmt: skip
def test_each_bound_is_the_greatest_somewhere(
    bound: str, times: Times, rank_of: tuple[int, ...], batches: int, later: float, limit: float, is_: float
) -> None:
    limits = [limit] * (max(rank_of) + 1)
    values = {
        name: one(costs(times, rank_of, Sizes(for_weights=later), limits), batches) for name, one in BOUNDS.items()
    }
    assert values[bound] == pytest.approx(is_) == lower_bound(times, rank_of, batches, Sizes(for_weights=later), limits)
    assert all(value < values[bound] - 1e-6 for name, value in values.items() if name != bound)


# -- on paper --------------------------------------------------------------------------------------------------------


@pytest.mark.simulated
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_paper_is_the_simulation(data: st.DataObject) -> None:
    """Makespan, ends and memory of the policies' orders, of those that rules make, and of both with backwards not
    split."""
    name, chunks = data.draw(st.sampled_from(FIXED))
    ranks, batches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    rank_of = POLICIES[name].placement(ranks, chunks)
    times, later = data.draw(times_of(ranks * chunks)), data.draw(st.sampled_from([1.0, 0.25]))
    limit = data.draw(st.sampled_from([inf, chunks * 1.0, chunks * 2.0]))
    paper = Paper(costs(times, rank_of, sizes := Sizes(for_weights=later), [limit] * ranks), batches)
    some = [orders_of(build(name, ranks, batches, chunks))]
    number = st.integers(0, 3)
    genes = [tuple(data.draw(number) for _ in range(ranks)) for _ in range(3)]
    rule = PriorityRule(
        genes[0],
        tuple(chunks + one for one in genes[1]),
        genes[2],
        deep=data.draw(st.booleans()),
        back=data.draw(st.booleans()),
    )
    span, made = follow(rule, paper.cost, batches)
    assert paper.length(made) == span
    assert all(paper.fits(order, rank) for rank, order in enumerate(made))
    some += [made, with_joined_backwards(made, paper)]
    for orders in some:
        schedule = schedule_of(orders, rank_of, batches, "")
        schedule.verify()
        run = simulate(schedule, times, sizes)
        assert paper.length(orders) == run.makespan
        assert tuple(own[-1] for own in paper.ends) == tuple(own[-1].end for own in run.computed)
        assert tuple(paper.peak(order, rank) for rank, order in enumerate(orders)) == run.peak
    assert paper.length(some[2]) <= span


@pytest.mark.parametrize(("name", "chunks"), FIXED)
def test_paper_is_the_simulation_where_messages_wait_for_their_link(name: str, chunks: int) -> None:
    schedule, times = build(name, 3, 5, chunks), Times(1, 2, 1, 4)
    paper, orders = Paper(costs(times, schedule.rank_of), 5), orders_of(schedule)
    assert paper.length(orders) == schedule_of(orders, schedule.rank_of, 5, "").simulate(times).makespan


@pytest.mark.simulated
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_paper_knows_the_memory_of_messages_too(data: st.DataObject) -> None:
    """Peaks of orders that rules make, split and not, are those of their schedule: in a row, in a V and around a
    loop."""
    (ranks, chunks), batches = (
        data.draw(st.sampled_from([(3, 2), (4, 2), (2, 2), (4, 1)])),
        data.draw(st.integers(3, 7)),
    )
    rank_of = data.draw(st.sampled_from([loop, vee]))(ranks, chunks)
    stages, number = ranks * chunks, st.integers(0, 8).map(lambda one: one / 4)
    activation, part = [data.draw(number) for _ in range(stages)], data.draw(st.sampled_from([1.0, 0.5, 0.0]))
    sizes = Sizes(
        activation,
        [part * one for one in activation],
        [data.draw(st.integers(1, 8)) / 4 for _ in range(stages - 1)],
        0.5,
    )
    cost = costs(data.draw(times_of(stages)), rank_of, sizes, [1000.0] * ranks)
    rule = data.draw(st.sampled_from(list(grid_rules(paper := Paper(cost, batches)))))
    _, orders = follow(rule, cost, batches)
    for one in (orders, with_joined_backwards(orders, paper)):
        assert tuple(Peaks(cost, batches).of(one)) == memory(schedule_of(one, rank_of, batches, ""), sizes).peak


# -- optimised -------------------------------------------------------------------------------------------------------


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
