"""``memory=`` of ``parallelize`` and ``train_step``: steps keep it by their own report; errors say what is missing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers_models
from searched import SLOW
from torch import nn

import autopar
from autopar import Mesh
from autopar.errors import MemoryLimitError
from autopar.report.memory import memory_of

MESH = Mesh(dp=2, tp=2)
H100 = "NVIDIA H100 80GB HBM3"


class Mlp(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        made = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(layers))
        self.layers = nn.ModuleList(made)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return (x - y).square().mean()


X = torch.randn(16, 64), torch.randn(16, 64)


def captured(memory: float | None = None, machine: Any = H100, layers: int = 3, **options: Any) -> Any:
    parallel = autopar.parallelize(Mlp(layers), MESH, machine=machine)
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters()), memory=memory, **options)
    step.capture(*X)
    return step


@pytest.mark.long
@pytest.mark.parametrize("options", [
    {}, {"zero": 3, "microbatches": 2}, {"amp": "bf16-O2"},
    *(pytest.param(options, marks=pytest.mark.sweep("stage 3 and O2 run in every test, and test_step_memory measures"))
      for options in ({"microbatches": 2}, {"zero": 1}, {"amp": "bf16-O1"}, {"zero": 2, "microbatches": 2},
                      {"zero": "search", "microbatches": 2}, {"clip_norm": 1.0, "ema": 0.9})),
], ids=str)  # fmt: skip
def test_steps_keep_the_limit(options: dict[str, Any]) -> None:
    free = captured(math.inf, **options)
    most = free.memory().peak
    assert free.solution.memory is None
    for part in (1.0, 0.85, 0.65):
        try:
            step = captured(most * part, time_limit=8.0, **options)
        except MemoryLimitError:
            assert part < {3: 1.0, 2: 0.85}.get(options.get("zero", 0), 0.0), "ZeRO 2 and 3 need little without a limit"
            break
        assert step.memory().peak <= most * part == step.solution.memory
        assert step.solution.least <= step.solution.nanoseconds
        assert f" within {most * part / 1e6:,.1f} MB a rank" in step.solution.certificate or most * part < 1e6
        if part == 1.0 and free.solution.exact:
            assert str(step.program) == str(free.program), "a limit that does not bind changes nothing"


@pytest.mark.long
def test_the_numbers_are_those_of_a_single_device() -> None:
    torch.manual_seed(0)
    model, alone = Mlp().double(), Mlp().double()
    alone.load_state_dict(model.state_dict())
    x = [t.double() for t in X]
    parallel = autopar.parallelize(model, MESH, machine=H100, memory=1.6e6)
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters()))
    optimizer = torch.optim.AdamW(alone.parameters())
    for _ in range(2):
        loss, expected = step.simulate(*x), alone(*x)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-9)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert step.memory().peak <= 1.6e6 == step.solution.memory


def a_llama() -> tuple[nn.Module, Any]:
    return transformers_models.llama(), transformers_models.batch()


@pytest.mark.long
@pytest.mark.parametrize("make", [
    lambda: (Mlp(1), X),
    pytest.param(a_llama, marks=pytest.mark.sweep("an MLP keeps the limit, and llamas are searched in other tests")),
], ids=["mlp", "llama"])  # fmt: skip
def test_a_call_keeps_the_limit(make: Callable[[], tuple[nn.Module, Any]]) -> None:
    model, batch = make()
    free = autopar.parallelize(model, MESH, machine=H100, example=batch, memory=math.inf)
    most = memory_of(free.local(0)).peak
    limited = autopar.parallelize(model, MESH, machine=H100, example=batch, memory=0.7 * most, time_limit=12.0)
    assert memory_of(limited.local(0)).peak <= 0.7 * most
    assert limited.solution.nanoseconds >= free.solution.nanoseconds
    assert limited.solution.least <= limited.solution.nanoseconds


def test_what_does_not_fit_is_refused_with_what_helps() -> None:
    with pytest.raises(MemoryLimitError) as error:
        captured(3e4, layers=1, time_limit=20.0)
    text = str(error.value)
    assert text.startswith("no plan was found that fits into 30.0 kB a rank: the smallest one found takes ")
    assert " kB too many\n" in text and "optimizer state " in text and "test_steps_within_memory.py" in text
    assert text.endswith(
        "most are optimizer state; use zero=3, offload=True, a mesh of more than 4 ranks, or a larger memory="
    )
    assert isinstance(error.value, MemoryError)


def test_options_that_are_used_already_are_no_remedy() -> None:
    with pytest.raises(MemoryLimitError, match="use offload=True, a mesh of more than 4 ranks") as error:
        captured(3e4, layers=1, zero=3, time_limit=20.0)
    assert "zero=3" not in str(error.value)


def test_a_call_that_does_not_fit_is_refused() -> None:
    with pytest.raises(MemoryLimitError, match=r"parallel.train_step can recompute activations"):
        autopar.parallelize(Mlp(1), MESH, machine=H100, example=X, memory=1000, time_limit=20.0)


@pytest.mark.parametrize("memory", [0, -1.0, "80e9", True, math.nan])
def test_a_limit_is_a_number_of_bytes(memory: Any) -> None:
    with pytest.raises(ValueError, match=r"memory=.* is not a number of bytes above 0, such as 80e9"):
        autopar.parallelize(Mlp(), MESH, memory=memory)
    parallel = autopar.parallelize(Mlp(), MESH)
    with pytest.raises(ValueError, match=r"memory=.* is not a number of bytes above 0, such as 80e9"):
        parallel.train_step(torch.optim.SGD(parallel.parameters()), memory=memory)


def test_a_machine_without_a_capacity_sets_no_limit() -> None:
    step = captured(machine=SLOW)
    assert "slow has no known capacity, so memory has no limit; memory= gives one, in bytes" in str(step.reports)
    assert step.solution.memory is None and "within" not in step.solution.certificate


def test_a_step_has_its_own_machine_and_limits() -> None:
    parallel = autopar.parallelize(Mlp(), MESH, machine=SLOW, memory=1e9)
    step = parallel.train_step(torch.optim.SGD(parallel.parameters()), machine=H100, memory=2e9, time_limit=30.0)
    step.capture(*X)
    assert (step.solution.machine.name, step.solution.memory) == (H100, 2e9)
    own = parallel.train_step(torch.optim.SGD(parallel.parameters()))
    own.capture(*X)
    assert (own.solution.machine, own.solution.memory) == (SLOW, 1e9)
