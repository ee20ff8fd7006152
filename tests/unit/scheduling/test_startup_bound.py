"""The bound with start-up costs: never above the shortest sequence of messages, and often equal to it."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest

from autopar.scheduling import Op, schedule
from autopar.scheduling.bounds import MOST, startup_bound

Job = tuple[int, int, int]  # head, flow, tail


def shortest(jobs: list[Job], startup: int) -> float:
    """The shortest of all sequences of messages, with chunks of whole seconds."""

    @cache
    def rest(now: int, left: tuple[int, ...]) -> float:
        if not any(left):
            return 0.0
        best = float("inf")
        for parts in itertools.product(*(range(flow + 1) for flow in left)):
            sent = [job for job, flow in zip(jobs, parts, strict=True) if flow]
            if sent:
                end = max([now, *(head for head, _, _ in sent)]) + startup + sum(parts)
                then = rest(end, tuple(flow - part for flow, part in zip(left, parts, strict=True)))
                best = min(best, max(then, *(end + tail for _, _, tail in sent)))
        return best

    return rest(0, tuple(flow for _, flow, _ in jobs))


def test_it_is_never_above_the_shortest_and_often_equal() -> None:
    draw, equal = random.Random(0), 0
    for _ in range(150):
        startup = draw.randint(1, 3)
        jobs = [(draw.randint(0, 6), draw.randint(0, 3), draw.randint(0, 6)) for _ in range(draw.randint(1, 3))]
        found, best = startup_bound(*zip(*jobs, strict=True), startup), shortest(jobs, startup)
        assert found <= best + 1e-9, (jobs, startup)
        equal += found >= best - 1e-9
    assert equal >= 75


@pytest.mark.parametrize(
    ("jobs", "seconds"),
    [
        ([(2, 3, 4)], 10),  # one message: 2, θ 1, 3, 4
        ([(0, 3, 0), (10, 3, 0)], 14),  # the first is sent before the second is there
        ([(0, 2, 0), (1, 2, 0)], 6),  # one message is enough: 1, θ 1, 2 and 2
        ([(0, 9, 9), (5, 1, 0)], 19),  # the second is sent while the first is read
        ([(0, 9, 0), (5, 9, 0)], 20),  # two messages, and no time in which nothing is sent
    ],
)
def test_known_bounds(jobs: list[Job], seconds: float) -> None:
    assert startup_bound(*zip(*jobs, strict=True), 1.0) == pytest.approx(seconds)
    assert startup_bound(*zip(*[job[::-1] for job in jobs], strict=True), 1.0) == pytest.approx(seconds)


def test_many_heads_are_rounded_down() -> None:
    draw = random.Random(1)
    jobs = [(draw.uniform(0, 50), draw.uniform(0, 0.1), draw.uniform(0, 50)) for _ in range(3 * MOST)]
    every = startup_bound(*zip(*jobs, strict=True), 0.5)
    few = sorted(jobs)[::3]
    assert startup_bound(*zip(*few, strict=True), 0.5) <= every <= 50 + 0.1 * 3 * MOST + 0.5 + 50


def test_a_small_collective_beside_large_ones_is_no_more_than_it_is() -> None:
    """What is left of the sum after the large ones has their rounding, and yet it is the small one."""
    heads, flows, tails = (0.0, 0.0, 0.003497), (0.000349525, 0.000349525, 2.7e-9), (0.003152717, 0.001590825, 5e-6)
    one_by_one = 0.0005 + 0.003652242  # the first two share a message, and the longest tail follows
    assert startup_bound(heads, flows, tails, 0.00015) <= one_by_one


def test_a_schedule_reports_it() -> None:
    """Each gradient is there a second after the one before: some wait for others, or some pay θ of their own."""
    ops: list[Op] = []
    for k in range(6):
        ops.append(Op(f"backward{k}", "compute", 1.0, (f"backward{k - 1}",) if k else ()))
        ops.append(Op(f"sum{k}", "dp", 2.0, (f"backward{k}",), bytes=8))
    assert schedule(ops, startup=1.0).bound == 10  # one backward, three start-up costs, six seconds of flow
    assert schedule(ops, startup=1.0).makespan == 10
    assert schedule(ops, startup=0.0).bound == 13


def test_nothing_has_no_bound() -> None:
    assert startup_bound((), (), (), 1.0) == 0.0
    assert startup_bound((3.0,), (0.0,), (4.0,), 1.0) == 0.0
