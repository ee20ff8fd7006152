"""Cuts, schedules and numbers of micro-batches of a pipeline: the best of all, by brute force."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import PlanError, ScheduleError
from autopar.pipeline import POLICIES, Sizes, Times, build
from autopar.search.devices.stages import Block, best_pipeline

SMALL = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])
BLOCKS = st.builds(Block, SMALL, SMALL, SMALL, SMALL, SMALL, SMALL, SMALL)


def brute_force(blocks: dict[int, list[Block]], ranks: int, policies: Any, limit: float) -> float:
    """The least makespan of all, each cut, policy and number simulated; ``inf`` if nothing fits."""
    best = math.inf
    for (count, row), policy in itertools.product(blocks.items(), policies):
        try:
            schedule = build(policy, ranks, count)
        except ScheduleError:
            continue
        for inner in itertools.combinations(range(1, len(row)), schedule.stages - 1):
            stages = [row[a:b] for a, b in itertools.pairwise((0, *inner, len(row)))]
            times = Times(*([sum(getattr(b, name) for b in s) for s in stages] for name in ("forward", "backward",
                          "weight")), [s[-1].transfer for s in stages[:-1]])  # fmt: skip
            sizes = Sizes([sum(b.activation for b in s) for s in stages], None, [s[-1].boundary for s in stages[:-1]],
                          [sum(b.fixed for b in s) for s in stages])  # fmt: skip
            run = schedule.simulate(times, sizes)
            if max(run.peak) <= limit:
                best = min(best, run.makespan)
    return best


@pytest.mark.simulated
@settings(max_examples=40, deadline=None)
@given(
    st.lists(BLOCKS, min_size=2, max_size=6),
    st.integers(1, 3),
    st.lists(st.integers(1, 5), min_size=1, max_size=2, unique=True),
    st.lists(st.sampled_from(sorted(POLICIES)), min_size=1, max_size=3, unique=True),
    st.sampled_from([math.inf, 30.0, 10.0]),
)
def test_it_is_the_best_of_all(
    row: list[Block], ranks: int, counts: list[int], policies: list[str], limit: float
) -> None:
    blocks = {count: row for count in counts}
    expected = brute_force(blocks, ranks, policies, limit)
    if expected == math.inf:
        with pytest.raises(PlanError, match=r"no pipeline (can be made|was found that fits)"):
            best_pipeline(blocks, ranks, policies=policies, limit=limit)
        return
    found = best_pipeline(blocks, ranks, policies=policies, limit=limit)
    assert found.seconds == pytest.approx(expected, rel=1e-9) and found.exact
    assert max(found.simulation.peak) <= limit


@pytest.mark.parametrize("policy", POLICIES)
def test_no_simulation_is_below_the_bound_of_its_cut(policy: str) -> None:
    """``best_pipeline`` asserts it for each cut that it simulates."""
    row = [Block(1 + k % 3, 2 - k % 2, 0.5 * (k % 4), 0.25 * (k % 2)) for k in range(8)]
    found = best_pipeline({4: row}, 2, policies=[policy])
    assert found.policy == policy and found.exact
    assert sum(found.simulation.work) == pytest.approx(4 * sum(b.forward + b.backward + b.weight for b in row))


def test_equal_layers_are_cut_equally_and_few_cuts_are_looked_at() -> None:
    row = [Block(1e-3, 1e-3, 1e-3, 1e-5)] * 32
    found = best_pipeline({16: row, 8: row[:0]}, 4, policies=["gpipe", "1f1b", "zb-h1"])
    assert found.cut == (0, 8, 16, 24) and (found.policy, found.microbatches) == ("zb-h1", 16)
    assert found.exact and found.looked_at < 500
    text = str(found)
    assert (
        "│ 2     │ 2    │ 16–23  │" in text and "zb-h1 with 16 micro-batches: " in text and "no other is faster" in text
    )


def test_it_stops_after_so_many_cuts_with_a_bound() -> None:
    row = [Block(1.0 + k % 5, 2.0 - k % 2, 1.0, 0.7) for k in range(14)]
    first = best_pipeline({6: row}, 4, policies=["1f1b", "gpipe"], most=1)
    assert first.looked_at == 1 and not first.exact and first.bound < first.seconds
    best = best_pipeline({6: row}, 4, policies=["1f1b", "gpipe"])
    assert first.bound <= best.seconds <= first.seconds and best.exact
    assert "none is more than" in str(first)


def test_what_cannot_be_made() -> None:
    row = [Block(1.0, 1.0, 1.0, fixed=100.0)] * 3
    with pytest.raises(PlanError, match=r"1f1b has 4 stages on 4 ranks, and the model has 3 blocks to cut"):
        best_pipeline({2: row}, 4, policies=["1f1b"])
    with pytest.raises(PlanError, match="no pipeline can be made: there is nothing to choose from: 0 numbers"):
        best_pipeline({}, 4)
    with pytest.raises(PlanError, match=r"no pipeline can be made: .*no-such"):
        best_pipeline({2: row}, 2, policies=["no-such"])
    with pytest.raises(PlanError, match=r"fits into 100 bytes a rank: the one that needs least takes 200; use more"):
        best_pipeline({2: row}, 2, policies=["1f1b"], limit=100)
