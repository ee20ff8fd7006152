"""A training step whose plan is searched, with its update, has the numbers of a single device."""

from __future__ import annotations

from typing import Any

import pytest
import steps
from searched import FAST

SIZES = {"dp": 2, "tp": 2}

CASES: list[dict[str, Any]] = [
    {},
    {"clip_norm": 0.1},
    {"zero": 1, "microbatches": 3, "clip_norm": 0.1},
    {"zero": 2, "microbatches": 2},
    {"zero": 3, "microbatches": 2, "clip_norm": 0.1},
]


@pytest.mark.long
@pytest.mark.parametrize("options", CASES, ids=str)
def test_steps(options: dict[str, Any]) -> None:
    steps.steps_alike("mlp", SIZES, options, count=3, layers=1, searched_on=FAST)


@pytest.mark.long
@pytest.mark.parametrize(("amp", "zero"), [
    pytest.param("bf16-O1", 0, marks=pytest.mark.sweep("fp16-O2 casts too, and scales the loss")), ("fp16-O2", 1)
])  # fmt: skip
def test_mixed_precision(amp: str, zero: int) -> None:
    """As far from float32 as on a single device."""
    options = {"zero": zero, "microbatches": 2, "clip_norm": 0.5}
    steps.mixed_alike("mlp", SIZES, amp, options, searched_on=FAST)
