"""``zero="search"``: the layout of each optimizer's state is chosen beside the plan, and priced as what runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import steps
import torch
from searched import FAST
from torch import nn

import autopar
from autopar import Mesh
from autopar.costs.machine import Link, Machine, machine_from
from autopar.errors import PlanError
from autopar.ir.nodes import name_of
from autopar.search.problem.optimizer_states import follows_home, follows_sum
from autopar.search.solutions.artifact import from_json
from autopar.search.solutions.planned import layout_text
from autopar.search.solutions.solution import Solution

pytestmark = pytest.mark.long

MESH = Mesh(dp=2, tp=2)
H100 = machine_from("NVIDIA H100 80GB HBM3")
LARGE = torch.empty(8192, 512, device="meta")


class Mlp(nn.Module):
    def __init__(self, size: int = 512, layers: int = 2) -> None:
        super().__init__()
        made = (nn.Sequential(nn.Linear(size, 4 * size), nn.ReLU(), nn.Linear(4 * size, size)) for _ in range(layers))
        self.layers = nn.Sequential(*made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def captured(
    plan: Any = None, x: torch.Tensor = LARGE, machine: Machine = H100, mesh: Mesh = MESH, **options: Any
) -> Any:
    with torch.device("meta"):
        model = Mlp(x.shape[1])
    parallel = autopar.parallelize(model, mesh, plan, machine=machine)
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters()), **{"memory": math.inf, **options})
    step.capture(x)
    return step


def with_states(solution: Solution, states: dict[str, str]) -> Solution:
    return replace(from_json(json.loads(json.dumps(solution.to_json()))), optimizer_states=states)


@pytest.mark.parametrize(
    "amp", [None, pytest.param("bf16-O2", marks=pytest.mark.sweep("steps in mixed precision are searched below"))]
)
def test_each_layout_of_a_state_has_the_price_of_what_runs(amp: str | None) -> None:
    """The oracle is the explicit program of the step, for some layouts of each state in each home that is found."""
    step = captured(zero="search", amp=amp)
    found, solution = step._current().micro.found, step.solution
    problem, states = found.again.problem, found.again.states
    alike = solution.nanoseconds - found.nanoseconds
    assert problem.explicit_price(states.tolist()) == found.nanoseconds and solution.least - found.least == alike
    different = 0
    for parameter, state in [*problem.chosen_states.items()][:2]:
        home, sum_ = (problem.homes[v][states[v]] for v in (problem.variables[n] for n in (parameter, state.sum)))
        allowed = follows_home([home], state.layouts)[0] & follows_sum(state.layouts, [sum_])[:, 0]
        for k in np.flatnonzero(allowed).tolist():
            other, name, attr = states.copy(), name_of(parameter), state.layouts[k]
            other[state.variable] = k
            text = layout_text(problem.value(parameter).type.shape, attr)
            priced = captured(with_states(found, {**found.optimizer_states, name: text}), zero="search", amp=amp)
            assert priced._current().micro.states[name] == attr
            assert priced.solution.nanoseconds - alike == problem.explicit_price(other.tolist()), (name, text)
            different += problem.explicit_price(other.tolist()) != found.nanoseconds
    assert different >= 3


@pytest.mark.parametrize(("x", "microbatches"), [
    pytest.param(LARGE, 1, id="large"),
    pytest.param(LARGE[:64], 4, id="small in micro-batches"),
    *(pytest.param(*case, marks=pytest.mark.sweep("both sizes run, with and without micro-batches"))
      for case in [(LARGE, 4), (LARGE[:64], 1)]),
])  # fmt: skip
def test_no_stage_is_below_the_bound(x: torch.Tensor, microbatches: int) -> None:
    stages = [captured(x=x, zero=stage, microbatches=microbatches).solution.nanoseconds for stage in range(4)]
    found = captured(x=x, zero="search", microbatches=microbatches).solution
    assert found.least <= min(stages) + 1
    assert found.least <= found.nanoseconds <= min(stages)


def test_a_mixture_is_cheaper_than_each_stage() -> None:
    x = torch.empty(32768, 512, device="meta")
    prices = [captured(x=x, zero=stage).solution.nanoseconds for stage in range(4)]
    step = captured(x=x, zero="search")
    assert step.solution.nanoseconds < min(prices)
    micro = step._current().micro
    split = [name for name, attr in micro.states.items() if attr != micro.parameters[name].attr]
    assert 0 < len(split) < len(micro.states), "some states are split further than their parameters, and some are not"


def test_of_equal_plans_the_lowest_stage_is_taken() -> None:
    free = Machine("free", "cpu", 64, Link(0.0, 1e30), Link(0.0, 1e30), Link(0.0, 1e30))
    micro = captured(x=LARGE[:64], machine=free, zero="search")._current().micro
    assert micro.states == {name: type.attr for name, type in micro.parameters.items()}


@pytest.mark.parametrize("options", [{"microbatches": 3, "clip_norm": 0.1}, {"ema": 0.9}], ids=str)
def test_the_numbers_are_those_of_a_single_device(options: dict[str, Any]) -> None:
    steps.steps_alike("mlp", {"dp": 2, "tp": 2}, {"zero": "search", **options}, count=3, layers=1, searched_on=FAST)


def test_the_numbers_in_mixed_precision() -> None:
    steps.mixed_alike(
        "mlp", {"dp": 2, "tp": 2}, "fp16-O2", {"zero": "search", "microbatches": 2, "clip_norm": 0.5}, searched_on=FAST
    )


def test_a_limit_of_memory() -> None:
    limit = 0.9 * captured(zero="search").memory().peak
    step = captured(zero="search", memory=limit, time_limit=8.0)
    assert step.memory().peak <= limit == step.solution.memory
    assert step.solution.least <= step.solution.nanoseconds


def test_the_file_has_the_layouts_of_states(tmp_path: Any) -> None:
    step = captured(zero="search")
    step.solution.save(tmp_path / "plan.json")
    again = captured(str(tmp_path / "plan.json"), zero="search")
    assert str(again.program) == str(step.program) and again._current().micro.states == step._current().micro.states
    content = json.loads((tmp_path / "plan.json").read_text())
    with pytest.raises(PlanError, match=r'optimizer_states: layouts are wanted by name, as \{"up.weight": '):
        from_json({**content, "optimizer_states": {"layers.0.0.weight": 3}})
    with pytest.raises(PlanError, match="the plan has a layout of the state of wrong, which is no parameter"):
        captured(from_json({**content, "optimizer_states": {"wrong": "[64]"}}), zero="search")
