"""On real gloo processes, steps whose communication crosses their end have the numbers of steps that end complete."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import crossing_steps
import pytest
from processes import ranks

from autopar.scheduling import ByteScheduler

CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("mlp", {"dp": 2}, {}),
    ("mlp", {"dp": 2}, {"overlap": ByteScheduler(64, 256)}),
    ("mlp", {"dp": 2}, {"zero": 1, "overlap": ByteScheduler(64, 256, fused=False)}),
    ("mlp", {"dp": 2}, {"zero": 2, "ema": 0.9}),
    ("mlp", {"dp": 2}, {"zero": 1, "clip_norm": 0.01, "overlap": ByteScheduler(64, 256)}),
    ("mlp", {"dp": 2}, {"zero": 1, "offload": True}),
    ("resnet", {"dp": 2}, {"zero": 3}),
    ("mlp", {"dp": 4}, {"zero": 1, "overlap": "p3"}),
]
MORE = [
    pytest.param(*case, marks=pytest.mark.sweep("simulated ranks run it, and mlp runs on four processes"))
    for case in [("llama", {"dp": 2, "tp": 2}, {"zero": 1}), ("mlp", {"dp": 3}, {"zero": 1})]
]


@pytest.mark.parametrize(("name", "sizes", "options"), [*CASES, *MORE], ids=str)
def test_equals_complete_steps(name: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    ranks(math.prod(sizes.values())).run(crossing_steps.alike, name, sizes, options)


SIMULATED = pytest.mark.sweep("test_step_across does the same between steps of simulated ranks")
WITH_JOB = (  # what ranks do together, or must not do alone
    "completed_by_a_call", "completed_by_state_dicts", "loaded_in_the_middle", "another_batch_shape",
    "an_exception_between_steps", "an_exception_in_a_step",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in WITH_JOB else SIMULATED) for name in crossing_steps.BETWEEN]
)
def test_between_steps(name: str) -> None:
    ranks(2).run(crossing_steps.between, name)


@pytest.mark.parametrize("options", [{}, {"zero": 1, "clip_norm": 1.0}], ids=str)
def test_closed_under_way(options: dict[str, Any]) -> None:
    ranks(2).run(crossing_steps.closed_under_way, options)


@pytest.mark.parametrize("options", [{}, {"zero": 1, "clip_norm": 1.0}], ids=str)
def test_saved_under_way(tmp_path: Path, options: dict[str, Any]) -> None:
    ranks(2).run(crossing_steps.saved_under_way, str(tmp_path), options)


def test_one_rank_alone() -> None:
    ranks(2).run(crossing_steps.one_rank_alone)
