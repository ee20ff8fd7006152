"""Check that the names of a step's values lead back to their roles, also where the model uses such names itself."""

from __future__ import annotations

import copy

import pytest
import torch

import autopar
from autopar.ir import value_names
from autopar.ir.value_names import ValueRole, role_and_parameter

NAMES = {
    "up.weight.grad": (value_names.gradient_name("up.weight"), ValueRole.GRADIENT, "up.weight"),
    "up.weight.copy": (value_names.copy_name("up.weight"), ValueRole.COPY, "up.weight"),
    "up.weight.ema": (value_names.average_name("up.weight"), ValueRole.AVERAGE, "up.weight"),
    "up.weight.before": (value_names.before_name("up.weight"), ValueRole.BEFORE, "up.weight"),
    "up.weight.exp_avg": (value_names.state_name("up.weight", "exp_avg"), ValueRole.STATE, "up.weight"),
    ".loss": (value_names.LOSS, ValueRole.LOSS, ""),
    ".scale": (value_names.SCALE, ValueRole.SCALE, ""),
    ".growth": (value_names.GROWTH, ValueRole.GROWTH, ""),
    ".averages": (value_names.AVERAGES, ValueRole.AVERAGES, ""),
    ".step.2": (value_names.steps_name(2), ValueRole.STEPS, ""),
    ".count.1": (value_names.count_name(1), ValueRole.COUNT, ""),
    ".total.0": (value_names.total_name(0), ValueRole.COUNT, ""),
    ".received.mm_1": (value_names.received_name("mm_1"), ValueRole.RECEIVED, ""),
    ".outputs.1": (value_names.stacked_name(1), ValueRole.OUTPUTS, ""),
    ".lr.0": (value_names.scheduled_name("lr", 0), ValueRole.SCHEDULED, ""),
}


@pytest.mark.parametrize("printed", NAMES)
def test_a_name_leads_back_to_its_role(printed: str) -> None:
    name, role, parameter = NAMES[printed]
    assert name == printed
    assert role_and_parameter(name, {"up.weight"}) == (role, parameter)


def test_every_role_has_a_name() -> None:
    assert {role for _, role, _ in NAMES.values()} == set(ValueRole)


@pytest.mark.parametrize("name", ["up.weight", "up.grad", "up.copy", "weight"])
def test_values_of_the_model_have_no_role_in_the_step(name: str) -> None:
    assert role_and_parameter(name, {"up.weight", "up.grad", "up.copy", "weight"}) is None


def test_the_input_of_a_micro_batch_leads_back_to_the_input() -> None:
    assert value_names.input_of_batch(value_names.batch_input_name("batch.labels", 3)) == "batch.labels"


class Named(torch.nn.Module):
    """Names of the step's own on the model's parameters and buffers; the submodule has the name of an input, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.x = torch.nn.Linear(4, 4), torch.nn.Module()
        self.x.grad = torch.nn.Parameter(torch.randn(4, 4))
        self.x.register_buffer("copy", torch.ones(4))
        self.lin.register_buffer("loss", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.x.copy.add_(1)
        return (self.lin(x) @ self.x.grad + self.x.copy + self.lin.loss).square().mean()


@pytest.mark.simulated
@pytest.mark.parametrize("simulated", [False, True], ids=["runs", "simulated"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_model_may_use_the_names_of_the_step(microbatches: int, simulated: bool) -> None:
    torch.manual_seed(0)
    model, x = Named(), torch.randn(8, 4)
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, autopar.Mesh(dp=2 if simulated else 1), "ddp")
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=1e-2), microbatches=microbatches, ema=0.9)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for _ in range(2):
        (step.simulate if simulated else step)(x)
        optimizer.zero_grad()
        for piece in x.chunk(microbatches):
            (alone(piece) / microbatches).backward()
        optimizer.step()
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(parallel.state_dict()[name], tensor, msg=lambda text, name=name: f"{name}: {text}")
    kinds = step.memory().kept
    assert kinds["parameters"] == 4 * sum(p.numel() for p in alone.parameters())
    assert kinds["buffers"] == 4 * 2 * 4  # x.copy and lin.loss
