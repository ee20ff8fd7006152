"""Compare schedules and bounds with the shortest of all orders."""

from __future__ import annotations

import random

import pytest
from small_steps import alive, lines_of, orders, random_step, shortest

from autopar.errors import ScheduleError
from autopar.scheduling import POLICIES, ByteScheduler, Op, schedule, simulate
from autopar.scheduling.simulation import ISSUES, Issue

FIXED = [
    *(name for name in POLICIES if name not in ("priorities", "longest-tail", "two-streams")),
    ByteScheduler(2, 4, fused=False),
]


@pytest.mark.parametrize("issue", ISSUES)
@pytest.mark.parametrize("seed", range(12))
def test_the_default_is_the_shortest_of_all_orders(issue: Issue, seed: int) -> None:
    draw = random.Random(seed)
    ops = random_step(draw, draw.randint(1, 6), whole=True)
    made = schedule(ops, issue=issue)
    assert made.makespan == pytest.approx(shortest(ops, issue, 0.0))
    assert made.bound <= made.makespan * (1 + 1e-9)


@pytest.mark.parametrize("issue", ISSUES)
@pytest.mark.parametrize("seed", range(12))
def test_chunks_and_buckets_are_never_longer_and_never_below_the_bound(issue: Issue, seed: int) -> None:
    draw = random.Random(seed)
    startup = draw.choice((0.0, 0.5, 2.0))
    ops = random_step(draw, draw.randint(1, 6), startup)
    most = shortest(ops, issue, startup)
    for policy in FIXED:  # ``schedule`` raises if a time is below the bound
        made = schedule(ops, policy, issue, startup=startup)
        assert simulate(ops, made.lines, issue, startup=startup) == made.simulation
        assert made.bound <= most * (1 + 1e-9)
    assert schedule(ops, issue=issue, startup=startup).makespan <= most * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_memory_is_never_exceeded(seed: int) -> None:
    draw = random.Random(seed)
    ops = random_step(draw, draw.randint(2, 6), whole=True)
    needs = sorted({alive(ops, lines_of(order)) for order in orders(ops)})
    for limit in needs:
        made = schedule(ops, memory=limit)
        assert made.memory == alive(ops, made.lines) <= limit
        assert made.makespan == pytest.approx(shortest(ops, "enqueue", 0.0, limit))
    if needs[0]:
        with pytest.raises(ScheduleError, match=rf"the smallest that was found needs {needs[0]} bytes"):
            schedule(ops, memory=needs[0] - 1)


@pytest.mark.parametrize("seed", range(20))
def test_larger_steps_are_never_longer_than_program_and_today(seed: int) -> None:
    draw = random.Random(seed)
    startup = draw.choice((0.0, 0.5, 2.0))
    ops = random_step(draw, 40, startup)
    for issue in ISSUES:
        made = schedule(ops, issue=issue, startup=startup)
        for policy in FIXED:
            other = schedule(ops, policy, issue, startup=startup)
            assert other.bound == made.bound
            if policy in ("program", "today"):
                assert made.makespan <= other.makespan


@pytest.mark.parametrize("issue", ISSUES)
def test_what_takes_no_time_starts_before_it_is_waited_for(issue: Issue) -> None:
    for seed in range(20):
        ops = random_step(random.Random(seed), 20, whole=True)
        made = schedule(ops, issue=issue)
        assert simulate(ops, made.lines, issue) == made.simulation


def test_a_schedule_is_a_function_of_its_input() -> None:
    ops = random_step(random.Random(0), 60, 0.5)
    assert schedule(ops, startup=0.5).lines == schedule(list(ops), startup=0.5).lines


def test_interference_makes_an_op_beside_a_message_take_longer() -> None:
    ops = [Op("reduce", "dp", 3.0), Op("op", "compute", 4.0), Op("last", "compute", 0.0, ("reduce", "op"))]
    assert schedule(ops, interference=0.5).makespan == 5  # 3 s at two thirds of the pace, then 2 s
    assert schedule(ops, "program", "direct", interference=0.5).makespan == 5


@pytest.mark.parametrize("issue", ISSUES)
@pytest.mark.parametrize("seed", range(8))
def test_interference_near_nothing_changes_next_to_nothing(issue: Issue, seed: int) -> None:
    ops = random_step(random.Random(seed), 20, 0.5)
    for policy in FIXED:
        made = schedule(ops, policy, issue, startup=0.5)
        slow = simulate(ops, made.lines, issue, startup=0.5, interference=1e-12)
        assert slow.makespan == pytest.approx(made.makespan)
        assert slow.exposed == pytest.approx(made.exposed)
