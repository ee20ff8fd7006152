"""Ranks that are slower than others are named."""

from __future__ import annotations

import pytest
import slow_ranks
from processes import ranks


@pytest.mark.parametrize(
    "function", (slow_ranks.one_computes_longer, slow_ranks.one_is_late, slow_ranks.one_stands_still_once)
)
def test_slow_ranks(function: object) -> None:
    ranks(4).run(function)
