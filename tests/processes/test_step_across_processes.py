"""On real gloo processes, steps whose communication crosses their end have the numbers of steps that end complete."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import crossing_steps
import crossing_trainings
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
    ("llama", {"dp": 2, "tp": 2}, {"zero": 1}),
    ("mlp", {"dp": 3}, {"zero": 1}),
    ("mlp", {"dp": 2}, {"microbatches": 3, "zero": 1}),
    ("mlp", {"dp": 2}, {"microbatches": 2, "zero": 1, "clip_norm": 0.01}),
    ("mlp", {"dp": 2}, {"microbatches": 2, "amp": "bf16-O2", "overlap": ByteScheduler(64, 256)}),
    ("mlp", {"dp": 2}, {"amp": "fp16-O2", "zero": 1}),
    ("llama", {"dp": 2, "tp": 2}, {"zero": 1, "microbatches": 2}),
    ("resnet", {"dp": 4}, {"zero": 1, "microbatches": 2}),
]


@pytest.mark.parametrize(("name", "sizes", "options"), CASES, ids=str)
def test_equals_complete_steps(name: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    ranks(math.prod(sizes.values())).run(crossing_steps.alike, name, sizes, options)


@pytest.mark.parametrize("name", crossing_steps.BETWEEN)
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


def test_ranks_that_have_taken_no_step_go_on() -> None:
    ranks(2).run(crossing_steps.all_but_one_finish)


def test_ranks_disagree() -> None:
    ranks(2).run(crossing_steps.ranks_disagree)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("options", crossing_trainings.OPTIONS, ids=str)
def test_trainings(options: dict[str, Any], size: int) -> None:
    ranks(size).run(crossing_trainings.alike, options, {"dp": size}, list(crossing_trainings.BETWEEN))
