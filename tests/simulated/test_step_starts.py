"""Plans of a step that no search has chosen, with the update in their price: presets from outside, and late plans."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from searched import SLOW
from torch import nn

import autopar
from autopar import Mesh
from autopar.errors import PlanError
from autopar.search import search as searching
from autopar.search.solutions.artifact import from_json
from autopar.step.solution import price_alike

pytestmark = pytest.mark.simulated


class Exp(nn.Module):
    """Its batch is too short for four ranks: the search tries no split that leaves half of them idle."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.exp().sin() * self.weight).sum()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def captured(model: nn.Module, x: torch.Tensor, **options: Any) -> Any:
    parallel = autopar.parallelize(model, Mesh(a=4), machine=SLOW)
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters()), **options)
    step.capture(x)
    return step


def alike(step: Any) -> int:
    """The nanoseconds that the search does not count."""
    return price_alike(step.program, SLOW)


@pytest.mark.parametrize("options", [{}, {"zero": "search"}], ids=str)
def test_a_preset_from_outside_has_the_price_of_its_update(options: dict[str, Any]) -> None:
    step = captured(Exp(), torch.zeros((2,) * 14), **options)
    found, solution = step._current().micro.found, step.solution
    assert solution.start.startswith("ddp, ") and found.start == solution.start
    assert found.nanoseconds == solution.nanoseconds - alike(step)
    assert f"the plan is the preset {solution.start}: the search has found none" in str(solution)


def test_a_preset_from_outside_cannot_be_asked_again() -> None:
    solution = captured(Exp(), torch.zeros((2,) * 14)).solution
    for ask in (lambda: solution.explain("weight"), lambda: solution.fix({"weight": (None, None, None)})):
        with pytest.raises(
            PlanError, match=r"the plan is the preset ddp, .* which has layouts that the search does not"
        ):
            ask()
    read = from_json(json.loads(json.dumps(solution.to_json())))
    assert read.start == solution.start
    with pytest.raises(PlanError, match="start: the name of a preset is wanted, not 3"):
        from_json({**json.loads(json.dumps(solution.to_json())), "start": 3})


@pytest.mark.parametrize("options", [{}, {"zero": 2, "microbatches": 2}, {"zero": "search"}], ids=str)
def test_a_plan_without_time_has_the_price_of_its_update(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "LEAST_SECONDS", -1.0)
    step = captured(Pair(), torch.zeros(64, 64), time_limit=0.0, **options)
    found, solution = step._current().micro.found, step.solution
    assert found.again.problem.late and "the time limit ended the search" in solution.certificate
    assert found.nanoseconds == solution.nanoseconds - alike(step)
    assert found.least <= found.nanoseconds and found.again.problem.ended(found.again.states.tolist()) > 0
