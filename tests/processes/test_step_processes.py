"""Training steps on real gloo processes have the numbers of a single device's loop."""

from __future__ import annotations

import functools
import math

import calls_of_searches
import calls_of_steps
import pytest
import steps
from processes import ranks

CASES = [("mlp", {"dp": 2}, 1), ("mlp", {"dp": 2, "tp": 2}, 3), ("resnet", {"dp": 2}, 1), ("mlp", {"dp": 4}, 2)]
MORE = [
    pytest.param(name, sizes, zero, marks=pytest.mark.sweep("its layers run on another mesh, and each way of ZeRO"))
    for name, sizes, zero in (
        ("llama sequence", {"dp": 2, "tp": 2}, 3),
        ("llama", {"dp": 2, "tp": 2}, 1),
        ("gpt2", {"dp": 2}, 2),
        ("bert", {"tp": 2}, 0),
        ("gpt2", {"dp": 4}, 2),
        ("bert", {"dp": 2, "tp": 2}, 0),
        ("resnet", {"dp": 2, "tp": 2}, 1),
        ("llama", {"dp": 4}, 0),
        ("gpt2", {"dp": 2, "tp": 2}, 2),
        ("gpt2", {"dp": 4}, 3),
        ("bert", {"dp": 4}, 1),
    )
]


@pytest.mark.parametrize(("name", "sizes", "zero"), [*CASES, *MORE], ids=str)
def test_steps(name: str, sizes: dict[str, int], zero: int) -> None:
    """Of one layer: that layers follow each other is seen by simulated ranks."""
    options = {"microbatches": 1 if name == "resnet" else 2, "zero": zero, "clip_norm": 0.5}
    run_steps = functools.partial(steps.steps_alike, count=3, layers=1)
    ranks(math.prod(sizes.values())).run(run_steps, name, sizes, options)


@pytest.mark.parametrize("name", [
    pytest.param(
        name, marks=() if name in ("mlp", "llama", "resnet") else pytest.mark.sweep("llama is of transformers too")
    )
    for name in steps.MODELS
])  # fmt: skip
def test_one_process(name: str) -> None:
    """A mesh of one rank needs no process group."""
    steps.steps_alike(
        name,
        {"dp": 1},
        {"microbatches": 1 if name == "resnet" else 2, "clip_norm": 0.5},
        count=3,
        called=True,
        layers=1,
    )


def test_after_a_refusal() -> None:
    ranks(2).run(calls_of_steps.after_a_refusal)


def test_messages_of_a_step() -> None:
    ranks(4).run(calls_of_steps.messages_of_a_step)


IN_GATHERS = pytest.mark.sweep("test_no_gather_is_coalesced runs it")


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=IN_GATHERS if name in ("loaded_states", "moved_by_zero") else ())
    for name in calls_of_steps.CALLS
])  # fmt: skip
def test_calls(name: str) -> None:
    ranks(4).run(getattr(calls_of_steps, name))


def test_a_searched_plan() -> None:
    ranks(4).run(calls_of_searches.searched_step)


def test_a_plan_within_a_limit_of_memory() -> None:
    ranks(4).run(calls_of_searches.step_within_memory)


def test_a_step_chooses_its_open_options() -> None:
    ranks(4).run(calls_of_searches.open_step)
