"""Streams: two over the same ranks are two process groups, made by all ranks in one order, shared, and closed."""

from __future__ import annotations

import pytest
import streams_on_ranks
from processes import ranks

CASES = ["two_streams", "shared_and_closed", "made_when_a_call_is_compiled", "other_streams_on_one_rank",
         "default_streams_need_nothing"]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_on_processes(name: str) -> None:
    ranks(4).run(getattr(streams_on_ranks, name))
