"""Streams: two over the same ranks are two process groups, made by all ranks in one order, shared, and closed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sides_on_ranks
import streams_on_ranks
from processes import ranks

CASES = ["two_streams", "shared_and_closed", "made_when_a_call_is_compiled", "other_streams_on_one_rank",
         "default_streams_need_nothing"]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_on_processes(name: str) -> None:
    ranks(4).run(getattr(streams_on_ranks, name))


@pytest.mark.parametrize(("name", "sizes", "options"), [
    ("mlp", {"dp": 2}, {"zero": 3, "microbatches": 2}),
    ("mlp", {"dp": 2, "tp": 2}, {"zero": 1}),
], ids=str)  # fmt: skip
def test_late_collectives_run_in_groups_of_their_own(name: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Steps in random orders have the numbers of ``today``, and ``close`` ends the groups."""
    own = {**sizes, "alone": 1}  # no other test has this mesh: a job that others share would keep the late groups
    made = ranks(math.prod(sizes.values())).run(sides_on_ranks.late_streams_are_alike, name, own, options, range(3))
    assert made[0] and all(groups == made[0] for groups in made), "all ranks make them in one order"
