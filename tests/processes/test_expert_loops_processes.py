"""Real gloo processes: experts in loops over the tokens that choose them, on their own ranks of an axis ep."""

from __future__ import annotations

import expert_loops_on_ranks
import pytest
from processes import ranks


@pytest.mark.parametrize("kind", [
    "OverHits", "Together",
    pytest.param("Sorted", marks=pytest.mark.sweep("simulated ranks run it, and processes run other loops")),
])  # fmt: skip
def test_any_choice_of_experts_has_the_same_numbers(kind: str) -> None:
    assert ranks(4).run(expert_loops_on_ranks.same_numbers, kind, {"dp": 2, "ep": 2}) == [1] * 4
