"""Optimised schedules whose objective is the longest span of a rank: against all orders, the policies, and published
rates."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import inf

import pytest
from optimised_schedules import FIXED, words

from autopar.errors import ScheduleError
from autopar.pipeline import Sizes, Times, build, optimise
from autopar.pipeline.bounds import BOUNDS, OBJECTIVES, costs, lower_bound
from autopar.pipeline.memory import memory
from autopar.pipeline.optimiser.orders import Paper, orders_of, schedule_of
from autopar.pipeline.optimiser.peaks import Peaks
from autopar.pipeline.policies import loop, vee
from autopar.pipeline.simulate import simulate


def merged(one: list[int], other: list[int]) -> Iterator[list[int]]:
    """All orders of a rank with two stages, given those of the stages."""
    for places in combinations(range(len(one) + len(other)), len(one)):
        rest, own = iter(other), dict(zip(places, one, strict=True))
        yield [own[place] if place in own else next(rest) for place in range(len(one) + len(other))]


def shortest(paper: Paper) -> float:
    """The shortest span of all orders within the limit, each simulated."""
    cost, batches, best = paper.cost, paper.batches, inf
    peaks = Peaks(cost, batches)
    of_rank = []
    for rank, own in enumerate(cost.stages_of):
        alone = [list(words(batches, stage)) for stage in own]
        orders = alone[0] if len(own) == 1 else [order for pair in product(*alone) for order in merged(*pair)]
        of_rank.append([order for order in orders if peaks.fits(order, rank)])
    for orders in product(*of_rank):
        if paper.length(list(orders)) < best:
            best = paper.length(list(orders))
            run = simulate(
                schedule_of(list(orders), cost.rank_of, batches, ""),
                Times(cost.forward, cost.backward, cost.weight, cost.transfer),
            )
            assert run.span == best
    return best


CASES = [((0,), 3), ((0, 1), 2), ((0, 1, 2), 2), ((0, 1), 3), (vee(2, 2), 1), (loop(2, 2), 1)]


@pytest.mark.parametrize(("rank_of", "batches"), CASES)
def test_nothing_is_below_the_bounds_and_the_best_is_found_or_nearly(rank_of: Sequence[int], batches: int) -> None:
    choose, ranks, stages = random.Random(0), max(rank_of) + 1, len(rank_of)
    for _ in range(6):
        times = Times(
            *([float(choose.randint(0, 9)) for _ in range(stages)] for _ in range(3)),
            [float(choose.randint(0, 4)) for _ in range(stages - 1)],
        )
        sizes, limit = (
            Sizes(for_weights=choose.choice([1.0, 0.5])),
            choose.choice([inf, stages // ranks, stages // ranks + 0.5, 2.5]),
        )
        cost = costs(times, rank_of, sizes, [limit] * ranks, "span")
        optimum = shortest(Paper(cost, batches))
        for name, bound in BOUNDS.items():
            assert bound(cost, batches) <= optimum * (1 + 1e-9), name
        found = optimise(
            times, ranks, batches, chunks=stages // ranks, sizes=sizes, limit=limit, tries=100, objective="span"
        )
        assert found.bound <= found.length == found.span == simulate(found.schedule, times).span
        if found.schedule.rank_of == tuple(rank_of):
            assert optimum * (1 - 1e-9) <= found.length
        assert found.length <= optimum * 1.05, "of the better placement"


@pytest.mark.parametrize(("bound", "is_"), [
    # rank 2: after its last backward 4 back and a W on rank 0, which began 4 earlier; 3 W of its own may follow
    ("work", 24 + 9 - 3),
    ("first backward", 9 + 24 - 3),  # rank 0: its first backward can begin after 1 + 8, and 3 forwards may come before
    # rank 0: every third forward waits for a micro-batch that is gone after F, 8, B and W
    ("round trips", 2 * 11 + 1 + 10 + 1),
    ("area", 8 * 11 / 3),  # rank 0: each micro-batch is kept for 11
])  # fmt: skip
def test_each_bound_by_hand(bound: str, is_: float) -> None:
    """Three ranks with F = B = W = 1, messages of 1, eight micro-batches, and memory for three."""
    assert BOUNDS[bound](costs(Times(transfer=1), (0, 1, 2), None, [3.0] * 3, "span"), 8) == pytest.approx(is_)


# Zero Bubble's automatic schedules (Qi et al. 2024): p, m; F, B, W, c in ms; hidden size, heads; ZB-2p's rate
PUBLISHED = (
    (8, 24, (18.522, 18.086, 9.337, 0.601), 2304, 24, 0.0433),
    (8, 32, (18.513, 18.086, 9.331, 0.626), 2304, 24, 0.0039),
    (8, 24, (29.718, 29.444, 19.927, 0.527), 4096, 32, 0.0029),
)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "batches", "times", "hidden", "heads", "rate"), PUBLISHED)
def test_zero_bubbles_published_spans(
    ranks: int, batches: int, times: tuple[float, ...], hidden: int, heads: int, rate: float
) -> None:
    """In the memory of 2p activations. As published, an activation is 34 h + 5 a s bytes of a token, of which W needs
    32 h."""
    sizes = Sizes(for_weights=32 * hidden / (34 * hidden + 5 * heads * 1024))
    found = optimise(
        Times(*times),
        ranks,
        batches,
        sizes=sizes,
        limit=2 * ranks,
        tries=300 if batches == 24 else 30,
        objective="span",
    )
    assert round(found.simulation.span_bubble_rate, 4) <= rate
    assert max(memory(found.schedule, sizes).peak) <= 2 * ranks * (1 + 1e-9)
    assert found.best_fixed is not None and found.span <= found.best_fixed[1]
    found.schedule.verify()


@pytest.mark.simulated
def test_where_w_keeps_everything_no_schedule_has_zero_bubbles_rate() -> None:
    """The published rates need the memory that B gives back: with W keeping all of an activation the bound is above
    them."""
    times, ranks, batches = Times(29.718, 29.444, 19.927, 0.527), 8, 24
    bound = lower_bound(times, loop(ranks, 1), batches, None, [2.0 * ranks] * ranks, "span")
    ideal = batches * (29.718 + 29.444 + 19.927)
    assert 1 - ideal / bound > 0.05
    assert optimise(times, ranks, batches, limit=2 * ranks, tries=10, objective="span").span == pytest.approx(bound), (
        "the best there is"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "cases",
    [
        ((1, (5, 7)), (2, (4.5, 6))),
        pytest.param(
            ((1, (5, 6, 7, 9)), (2, (4.5, 5, 6))), marks=pytest.mark.sweep("two limits show the order of the spans")
        ),
    ],
    ids=["two limits", "more limits"],
)
def test_more_memory_is_not_worse_and_no_policy_is_better(cases: tuple[tuple[int, tuple[float, ...]], ...]) -> None:
    times, sizes = Times(18.522, 18.086, 9.337, 0.601), Sizes(for_weights=0.4, boundary=0.02)
    for chunks, limits in cases:
        each = Times(*(one / chunks for one in (18.522, 18.086, 9.337)), 0.601) if chunks > 1 else times
        found = [
            optimise(each, 4, 12, chunks=chunks, sizes=sizes, limit=limit * chunks, tries=20, objective="span")
            for limit in limits
        ]
        spans = [one.span for one in found]
        assert spans == sorted(spans, reverse=True)
        for limit, one in zip(limits, found, strict=True):
            assert one.bound <= one.span and one.ratio >= 1 and one.objective == "span"
            for name, number in FIXED:
                run = simulate(build(name, 4, 12, number), each, sizes) if number == chunks else None
                if run is not None and max(run.peak) <= limit * chunks:
                    assert one.best_fixed is not None
                    assert one.span <= one.best_fixed[1] <= run.span * (1 + 1e-9)


@pytest.mark.simulated
def test_each_objective_is_shorter_by_its_own_measure() -> None:
    times, sizes = Times(29.718, 29.444, 19.927, 0.527), Sizes(for_weights=0.43)
    span, makespan = (
        optimise(times, 4, 12, sizes=sizes, limit=8, tries=60, objective=one) for one in ("span", "makespan")
    )
    assert span.span < makespan.span and makespan.makespan <= span.makespan
    assert (span.length, makespan.length) == (span.span, makespan.makespan)


def test_paper_measures_spans_as_the_simulation_does() -> None:
    times = Times(1, 2, 1, 4)
    for name, chunks in FIXED:
        schedule = build(name, 3, 5, chunks)
        assert (
            Paper(costs(times, schedule.rank_of, objective="span"), 5).length(orders_of(schedule))
            == simulate(schedule_of(orders_of(schedule), schedule.rank_of, 5, ""), times).span
        )


def test_text() -> None:
    assert (
        str(optimise(Times(), 2, 3, limit=2, objective="span"))
        == """\
optimised: 2 ranks, 3 micro-batches
  longest span 10
  makespan     10
  bubble       1, 10.00% of the longest span
  lower bound  10
  ratio        1.0000, so nothing is faster
  best fixed   zb-h1: 10, 1.000 times as long
  peak memory  2 2  of  2 2"""
    )


@pytest.mark.parametrize("objective", ["time", None, 3, ["span"]])
def test_other_objectives_are_refused(objective: object) -> None:
    with pytest.raises(ScheduleError) as error:
        optimise(Times(), 2, 2, objective=objective)
    assert str(error.value) == f"optimise: objective is 'makespan' or 'span', not {objective!r}"
    assert OBJECTIVES == ("makespan", "span")
