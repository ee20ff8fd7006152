"""Real gloo processes: the user's own loop has the single-device numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import calls_of_models
import calls_of_optimizers
import calls_of_states
import calls_of_steps
import calls_refused
import gathers
import loops
import pytest
import weights
import zoo_on_processes
from processes import ranks

STEPS = [
    ("mlp", {"dp": 2}),
    ("mlp", {"dp": 2, "tp": 2}),
    ("mlp", {"tp": 4}),
    ("llama sequence", {"tp": 2}),
    ("resnet", {"dp": 2}),
    *(
        pytest.param(*case, marks=pytest.mark.sweep("test_step_processes trains it, and llama runs in this loop"))
        for case in [("gpt2", {"dp": 2}), ("bert", {"tp": 2})]
    ),
]
MORE_STEPS = [
    pytest.param(name, sizes, marks=pytest.mark.sweep("each model runs on another mesh, each mesh has another model"))
    for name in loops.MODELS
    for sizes in ({"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 4})
    if (name, sizes) not in STEPS and (name in ("mlp", "llama") or math.prod(sizes.values()) == 4)
]


@pytest.mark.parametrize(("name", "sizes"), [*STEPS, *MORE_STEPS], ids=str)
def test_loop(name: str, sizes: dict[str, int]) -> None:
    """Of one layer: that layers follow each other is seen by simulated ranks."""
    ranks(math.prod(sizes.values())).run(loops.loop_alike, name, sizes, 1, 3)


@pytest.mark.parametrize("sizes", [{"dp": 1}, {"dp": 1, "tp": 1}], ids=str)
@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_loop_of_one_process(name: str, sizes: dict[str, int]) -> None:
    """A mesh of one rank needs no process group."""
    loops.loop_alike(name, sizes, 1, 3)


@pytest.mark.sweep("a mesh of one rank needs no process group for mlp and llama, and all models run on more ranks")
@pytest.mark.parametrize("sizes", [{"dp": 1}, {"dp": 1, "tp": 1}], ids=str)
@pytest.mark.parametrize("name", [name for name in loops.MODELS if name not in ("mlp", "llama")])
def test_loop_of_another_model_of_one_process(name: str, sizes: dict[str, int]) -> None:
    loops.loop_alike(name, sizes, 1, 3)


def in_gathers(case: Callable[..., None]) -> Any:
    return pytest.param(case, marks=pytest.mark.sweep("test_no_gather_is_coalesced runs it"))


CALLS = [
    calls_of_models.inputs_and_outputs,
    in_gathers(calls_of_models.inputs_with_gradients),
    calls_of_models.gradients_of_some_outputs,
    calls_of_models.frozen_and_tied,
    calls_of_states.first_ranks_values,
    calls_of_models.captured_again,
    calls_refused.bad_calls,
    calls_of_models.sizes_of_one,
    calls_of_models.cache,
    calls_of_optimizers.fused_optimizer,
    calls_refused.values_that_differ,
    calls_refused.backwards_that_differ,
    calls_refused.modes_that_differ,
    calls_of_states.loaded_values_of_the_first_rank,
    calls_of_models.randomness,
    calls_of_models.wrapped_layers,
]


ON_TWO = {  # ranks: one axis shows it
    calls_of_models.frozen_and_tied,
    calls_of_models.captured_again,
    calls_of_models.cache,
    calls_of_models.wrapped_layers,
}


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_calls(function: Callable[..., None]) -> None:
    ranks(2 if function in ON_TWO else 4).run(function)


SINGLE: list[Callable[..., None]] = [
    calls_of_models.inputs_with_gradients,
    calls_of_steps.loaded_states,
    calls_of_steps.moved_by_zero,
]


def test_no_gather_is_coalesced() -> None:
    """gloo's coalesced gather, DTensor's own, may crash: neither steps nor what is loaded or initialised begins one."""
    assert all(
        len(lines) == 1 and "full_tensor" in lines[0]
        for lines in ranks(4).run(gathers.coalesced_in, gathers.by_dtensor)
    ), "it would be seen"
    cases = [
        *((function,) for function in SINGLE),
        (calls_of_states.state_dicts, "llama"),
        (weights.initialized, "mlp", "own", {"dp": 2, "tp": 2}),
    ]
    for function, *args in cases:
        assert ranks(4).run(gathers.coalesced_in, function, *args) == [[]] * 4, function


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.sweep("test_no_gather_is_coalesced runs it for llama")
def test_state_dicts(name: str) -> None:
    ranks(4).run(calls_of_states.state_dicts, name)


def test_the_readmes_loop() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = [block for block in re.findall(r"```py\n(.*?)```", text, re.DOTALL) if "loss.backward()" in block]
    ranks(4).run(calls_of_optimizers.readme_loop, code)


NAMED = [
    pytest.param(
        name, sizes, marks=pytest.mark.sweep("test_named simulates it, and on processes test_loop and others run")
    )
    for name, sizes in (
        ("mixtral", {"tp": 2}),
        ("resnet", {"dp": 2}),
        ("llama tied", {"dp": 2, "tp": 2}),
        ("t5", {"dp": 2, "tp": 2}),
        ("vit", {"dp": 2, "tp": 2}),
        ("mixtral", {"dp": 2, "tp": 2}),
        ("resnet", {"dp": 4}),
        ("gpt2", {"dp": 2, "tp": 2}),
        ("bert", {"dp": 2, "tp": 2}),
        ("resnet", {"dp": 2, "tp": 2}),
        ("t5", {"tp": 4}),
    )
]


@pytest.mark.parametrize(("name", "sizes"), NAMED, ids=str)
def test_architectures(name: str, sizes: dict[str, int]) -> None:
    ranks(math.prod(sizes.values())).run(zoo_on_processes.same_numbers, name, sizes)
