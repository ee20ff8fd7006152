"""The plan of a training step, asked again and from a file, has the price and the bound of the whole step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from searched import FAST
from torch import nn

import autopar
from autopar import Mesh
from autopar.costs.machine import Link, Machine
from autopar.search.solutions.solution import Solution
from autopar.step.train_step import TrainStep

pytestmark = pytest.mark.simulated

LINK = Link(1e-12, 5e3)
SLOW_LINKS = Machine("slow links", "any", 64, LINK, LINK, Link(1e-12, 1e6), (("f64", 1e9),))


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def step_of(plan: Any = None, optimizer: Any = torch.optim.AdamW, **options: Any) -> tuple[TrainStep, Solution]:
    parallel = autopar.parallelize(Loss().double(), Mesh(a=2), plan, machine=SLOW_LINKS)
    step = parallel.train_step(optimizer(parallel.parameters(), lr=1e-2), **options)
    step.simulate(torch.ones(4, 64, dtype=torch.float64))
    assert step.solution is not None
    return step, step.solution


@pytest.mark.parametrize("options", [{}, {"zero": 1}, {"microbatches": 2}], ids=str)
def test_questions_have_the_price_of_the_whole_step(options: dict[str, Any]) -> None:
    step, solution = step_of(**options)
    assert solution.nanoseconds == autopar.price(step.program, SLOW_LINKS).nanoseconds
    chosen = next(row for row in solution.explain("up.weight").alternatives if row.chosen)
    fixed = solution.fix({})
    assert chosen.nanoseconds == fixed.nanoseconds == solution.nanoseconds
    assert fixed.least == solution.least


def test_the_piece_that_a_rank_takes_of_a_parameter_has_a_price() -> None:
    step, solution = step_of(["search", {"*.weight": (None, None)}], zero=1)
    assert "slice(up_weight" in str(step.program)
    assert solution.exact


def test_a_file_keeps_the_bound(tmp_path: Path) -> None:
    _, solution = step_of(clip_norm=1.0)
    for again in range(2):
        solution.save(tmp_path / f"{again}.json")
        _, loaded = step_of(str(tmp_path / f"{again}.json"), clip_norm=1.0)
        assert (loaded.nanoseconds, loaded.least) == (solution.nanoseconds, solution.least)
        solution = loaded


def test_a_plan_of_another_update_proves_nothing(tmp_path: Path) -> None:
    _, solution = step_of()
    solution.save(tmp_path / "plan.json")
    _, loaded = step_of(str(tmp_path / "plan.json"), torch.optim.SGD)
    _, best = step_of(None, torch.optim.SGD)
    assert best.exact and best.nanoseconds < loaded.nanoseconds
    assert not loaded.exact
    assert loaded.certificate.endswith(
        "how much cheaper a plan could be is not known; the plan was searched for a step with another update (AdamW; "
        "here it is SGD), so nothing is proven"
    )


def test_updates_with_one_price_are_told_apart(tmp_path: Path) -> None:
    _, solution = step_of(optimizer=torch.optim.AdamW)
    solution.save(tmp_path / "plan.json")
    _, other = step_of(str(tmp_path / "plan.json"), torch.optim.Adam)
    assert other.nanoseconds == solution.nanoseconds and solution.exact
    assert other.least == 0 and other.certificate.endswith("(AdamW; here it is Adam), so nothing is proven")
    _, same = step_of(str(tmp_path / "plan.json"), lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr / 7))
    assert same.exact and same.least == solution.least  # a learning rate costs nothing


def test_options_of_the_step_are_said(tmp_path: Path) -> None:
    _, solution = step_of(clip_norm=1.0)
    solution.save(tmp_path / "plan.json")
    _, other = step_of(str(tmp_path / "plan.json"))
    assert "with another update (AdamW, clip_norm=1.0; here it is AdamW), so nothing is proven" in other.certificate


def test_a_plan_on_another_machine_has_its_price_there(tmp_path: Path) -> None:
    _, solution = step_of()
    solution.save(tmp_path / "plan.json")
    step, other = step_of(str(tmp_path / "plan.json"), machine=FAST)
    assert other.machine == FAST and other.nanoseconds == autopar.price(step.program, FAST).nanoseconds
    assert other.certificate.endswith(
        "ms a step on fast links, and how much cheaper a plan could be is not known; the plan was searched for slow "
        "links, so nothing is proven"
    )
    step, other = step_of(str(tmp_path / "plan.json"))
    assert other.exact and other.machine == SLOW_LINKS


def test_the_update_of_a_plan_with_other_layouts_is_the_same() -> None:
    _, solution = step_of()
    fixed = solution.fix({"up.weight": (None, "a"), "down.weight": (None, "a")})
    assert fixed.diff(solution).rows
    _, taken = step_of(fixed)
    assert (taken.nanoseconds, taken.least, taken.update) == (fixed.nanoseconds, fixed.least, solution.update)


def test_a_file_of_a_searched_stage_keeps_the_bound(tmp_path: Path) -> None:
    _, solution = step_of(zero="search")
    solution.save(tmp_path / "plan.json")
    _, again = step_of(str(tmp_path / "plan.json"), zero="search")
    assert solution.exact and again.exact and again.least == solution.least
