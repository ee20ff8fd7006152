"""First values that are kept are the same on all ranks, or the call is refused."""

from __future__ import annotations

import first_values_on_ranks
import pytest
from processes import ranks


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_first_values_that_all_ranks_have_alike(plan: str) -> None:
    ranks(2).run(first_values_on_ranks.alike, plan)


def test_first_values_that_differ_are_refused() -> None:
    said = ranks(2).run(first_values_on_ranks.different, "ddp")
    assert said[0] == said[1]
    assert said[0].endswith(
        '\n  first_values="keep" keeps what each rank has at its first call: rng, a Random; let all ranks have the '
        "same there, by one seed for example, or draw or read it once and pass it to forward"
    ), said[0]
