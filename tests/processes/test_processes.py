"""Real gloo processes: the user's own loop has the single-device numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import calls
import calls_of_steps
import gathers
import loops
import pytest
import weights
import zoo_on_processes
from processes import ranks

TWO, FOUR = [{"dp": 2}, {"tp": 2}], [{"dp": 2, "tp": 2}, {"tp": 4}]
STEPS = [(name, sizes) for name in loops.MODELS for sizes in (*FOUR, *TWO * (name in ("mlp", "llama")))]


@pytest.mark.parametrize(("name", "sizes"), STEPS, ids=str)
def test_ten_steps(name: str, sizes: dict[str, int]) -> None:
    ranks(math.prod(sizes.values())).run(loops.ten_steps, name, sizes)


@pytest.mark.parametrize("sizes", [{"dp": 1}, {"dp": 1, "tp": 1}], ids=str)
@pytest.mark.parametrize("name", loops.MODELS)
def test_ten_steps_of_one_process(name: str, sizes: dict[str, int]) -> None:
    """A mesh of one rank needs no process group."""
    loops.ten_steps(name, sizes)


CALLS = ["inputs_and_outputs", "inputs_with_gradients", "gradients_of_some_outputs", "frozen_and_tied",
         "first_ranks_values", "captured_again", "bad_calls", "sizes_of_one", "cache",
         "fused_optimizer", "values_that_differ", "backwards_that_differ", "modes_that_differ",
         "loaded_values_of_the_first_rank", "randomness", "wrapped_layers"]  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    ranks(4).run(getattr(calls, name))


SINGLE: list[Callable[..., None]] = [
    calls.inputs_with_gradients,
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
        (calls.state_dicts, "llama"),
        (weights.initialized, "mlp", "own", {"dp": 2, "tp": 2}),
    ]
    for function, *args in cases:
        assert ranks(4).run(gathers.coalesced_in, function, *args) == [[]] * 4, function


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_state_dicts(name: str) -> None:
    ranks(4).run(calls.state_dicts, name)


def test_the_readmes_loop() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = [block for block in re.findall(r"```py\n(.*?)```", text, re.DOTALL) if "torch.optim." in block]
    ranks(4).run(calls.readme_loop, code)


NAMED = ["llama tied", "gpt2", "bert", "t5", "vit", "resnet", "mixtral"]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [*((name, {"dp": 2, "tp": 2}) for name in NAMED), ("t5", {"tp": 4}), ("resnet", {"dp": 4})],
    ids=str,
)
def test_architectures(name: str, sizes: dict[str, int]) -> None:
    ranks(4).run(zoo_on_processes.same_numbers, name, sizes)
