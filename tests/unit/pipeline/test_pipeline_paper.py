"""Orders on paper have the makespan, the ends and the memory of their simulation."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optimised_schedules import FIXED
from stage_times import times_of

from autopar.pipeline import POLICIES, build
from autopar.pipeline.bounds import costs
from autopar.pipeline.memory import Sizes, memory
from autopar.pipeline.optimiser.greedy import PriorityRule, follow
from autopar.pipeline.optimiser.orders import Paper, orders_of, schedule_of
from autopar.pipeline.optimiser.peaks import Peaks
from autopar.pipeline.optimiser.search import grid_rules, with_joined_backwards
from autopar.pipeline.policies import loop, vee
from autopar.pipeline.simulate import Times, simulate


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
    peaks = Peaks(paper.cost, batches)
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
    assert all(peaks.fits(order, rank) for rank, order in enumerate(made))
    some += [made, with_joined_backwards(made, paper)]
    for orders in some:
        schedule = schedule_of(orders, rank_of, batches, "")
        schedule.verify()
        run = simulate(schedule, times, sizes)
        assert paper.length(orders) == run.makespan
        assert tuple(own[-1] for own in paper.ends) == tuple(own[-1].end for own in run.computed)
        assert tuple(peaks.of(orders)) == run.peak
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
    rule, paper = data.draw(st.sampled_from(list(grid_rules(cost)))), Paper(cost, batches)
    _, orders = follow(rule, cost, batches)
    for one in (orders, with_joined_backwards(orders, paper)):
        assert tuple(Peaks(cost, batches).of(one)) == memory(schedule_of(one, rank_of, batches, ""), sizes).peak
