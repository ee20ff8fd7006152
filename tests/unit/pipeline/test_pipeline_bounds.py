"""The bounds of schedules, and optimised ones, against the shortest of all orders."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optimised_schedules import words
from stage_times import times_of

from autopar.pipeline.bounds import BOUNDS, costs, lower_bound
from autopar.pipeline.memory import Sizes
from autopar.pipeline.optimiser import optimise
from autopar.pipeline.optimiser.orders import Paper, schedule_of
from autopar.pipeline.optimiser.peaks import Peaks
from autopar.pipeline.policies import loop, vee
from autopar.pipeline.simulate import Times, simulate


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
                if used + (activation, later - activation, 0)[of] > limit:
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
    paper, peaks = Paper(cost, batches), Peaks(cost, batches)
    own = [[order for order in words(batches, stage) if peaks.fits(order, stage)] for stage in range(stages)]
    spans = [
        schedule_of(list(orders), range(stages), batches, "").simulate(times).makespan
        for orders in product(*own)
        if paper.length(list(orders)) < inf
    ]
    assert shortest(times, range(stages), batches, limit=limit) == min(spans)


ONE_STAGE = [(1, 1, 1), (1, 3, 1), (2, 1, 1), (2, 2, 1), (2, 3, 1), (3, 1, 1), (3, 2, 1), (2, 5, 1), (3, 3, 1)]
TWO_STAGES = [(1, 2, 2), (2, 1, 2), (2, 2, 2)]
TINY = ONE_STAGE + TWO_STAGES


def tiny(
    draw: random.Random, cases: Sequence[tuple[int, int, int]], laters: Sequence[float] = (1.0, 0.5, 0.0)
) -> tuple:
    """A small case, and the makespan of the fastest schedule for each placement."""
    ranks, batches, chunks = draw.choice(cases)
    stages = ranks * chunks
    times = Times(
        *([float(draw.randint(0, 9)) for _ in range(stages)] for _ in range(3)),
        [float(draw.randint(0, 4)) for _ in range(stages - 1)],
    )
    later, limit = draw.choice(laters), draw.choice([inf, *(chunks + one / 2 for one in range(4))])
    placements = {loop(ranks, chunks), vee(ranks, chunks)} if chunks == 2 else {loop(ranks, chunks)}
    optima = {rank_of: shortest(times, rank_of, batches, later=later, limit=limit) for rank_of in placements}
    return ranks, batches, chunks, times, Sizes(for_weights=later), limit, optima


@pytest.mark.simulated
@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False))
def test_nothing_is_below_the_bounds(choose: random.Random) -> None:
    ranks, batches, _, times, sizes, limit, optima = tiny(choose, TINY, (2.0, 1.0, 0.5, 0.0))
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
