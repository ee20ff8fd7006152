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
    ("mlp", {"dp": 2}, {"microbatches": 3, "zero": 1}),
    ("mlp", {"dp": 2}, {"microbatches": 2, "zero": 1, "clip_norm": 0.01}),
    ("mlp", {"dp": 2}, {"microbatches": 2, "amp": "bf16-O2", "overlap": ByteScheduler(64, 256)}),
    ("mlp", {"dp": 2}, {"amp": "fp16-O2", "zero": 1}),
    ("resnet", {"dp": 4}, {"zero": 1, "microbatches": 2}),
]
MORE = [
    pytest.param(*case, marks=pytest.mark.sweep("simulated ranks run it, and mlp runs on four processes"))
    for case in [
        ("llama", {"dp": 2, "tp": 2}, {"zero": 1}),
        ("mlp", {"dp": 3}, {"zero": 1}),
        ("llama", {"dp": 2, "tp": 2}, {"zero": 1, "microbatches": 2}),
    ]
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


def test_ranks_that_have_taken_no_step_go_on() -> None:
    ranks(2).run(crossing_steps.all_but_one_finish)


def test_ranks_disagree() -> None:
    ranks(2).run(crossing_steps.ranks_disagree)


FOUR = pytest.mark.sweep("two ranks do the same, and two other options run on four")


@pytest.mark.parametrize(("options", "size"), [
    pytest.param(options, size, marks=FOUR if size == 4 and k < 2 else ())
    for size in (2, 4)
    for k, options in enumerate(crossing_trainings.OPTIONS)
], ids=str)  # fmt: skip
def test_trainings(options: dict[str, Any], size: int) -> None:
    """test_step_across does each of these things alone."""
    ranks(size).run(crossing_trainings.alike, options, {"dp": size}, ["one_after_another"])
