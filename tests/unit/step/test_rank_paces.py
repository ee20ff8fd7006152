"""Which ranks are slower than the others, as a function of what they measured."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import Mesh
from autopar.ir.hosts import Hosts
from autopar.step.reports.pace import NOTICED, SLOWER, RankPaces, slow_ranks

pytestmark = pytest.mark.fast


def hosts(ranks: int) -> Hosts:
    return Hosts(("alpha", "beta"), tuple(int(rank >= ranks // 2) for rank in range(ranks)))


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9))
def test_a_rank_is_compared_with_the_median_of_the_others(seconds: list[float]) -> None:
    mesh = Mesh(dp=len(seconds))
    slow = slow_ranks({rank: (own, 0.0) for rank, own in enumerate(seconds)}, mesh, hosts(len(seconds)))
    wanted = set()
    for rank, own in enumerate(seconds):
        others = seconds[:rank] + seconds[rank + 1 :]
        if others and own > SLOWER * median(others) and own - median(others) > NOTICED:
            wanted.add(rank)
    assert {one.rank for one in slow} == wanted
    assert [one.seconds - one.others for one in slow] == sorted(
        (one.seconds - one.others for one in slow), reverse=True
    )


def test_stages_are_not_compared_with_each_other() -> None:
    mesh = Mesh(pp=2, dp=2)
    paces = {0: (1.0, 0.0), 1: (1.0, 0.0), 2: (5.0, 0.0), 3: (5.0, 0.0)}
    assert slow_ranks(paces, mesh, hosts(4)) == ()
    (slow,) = slow_ranks({**paces, 1: (2.0, 0.0)}, mesh, hosts(4))
    assert (slow.rank, slow.others) == (1, 1.0)
    (late,) = slow_ranks({**paces, 1: (1.0, 3.0)}, mesh, hosts(4))
    assert (late.rank, late.kind) == (1, "spends between two steps")


def test_the_report_names_rank_and_host() -> None:
    paces = {rank: (0.012, 0.0003) for rank in range(40)} | {27: (0.031, 0.0003)}
    text = str(RankPaces(64, paces, hosts(40), slow_ranks(paces, Mesh(dp=40), hosts(40))))
    assert text.startswith("medians of 64 steps\n") and "and 24 faster ranks\n" in text
    assert text.endswith("rank 27 on host beta computes 31.0 ms a step, 12.0 ms is the median of the others\n")
