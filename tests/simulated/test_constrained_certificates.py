"""What a certificate claims where the user has given layouts: only plans that have them are compared."""

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
from autopar.search.certificate import Certificate, at_most
from autopar.search.solutions.artifact import load
from autopar.search.solutions.solution import Solution

pytestmark = pytest.mark.simulated

MESH = Mesh(dp=2, tp=2)
X = torch.randn(8, 16, dtype=torch.float64)
FREE, CONSTRAINED = "and no plan is cheaper", "and no plan with these constraints is cheaper"
LINK = Link(1e-12, 5e3)
SLOW_LINKS = Machine("slow links", "any", 64, LINK, LINK, Link(1e-12, 1e6), (("f64", 1e9),))


class Constrains(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return autopar.constrain(super().forward(x), (None, None))


def model(cls: type[nn.Module] = nn.Linear) -> nn.Module:
    return cls(16, 16, bias=False).double()  # type: ignore[call-arg]


def searched(plan: Any = None, cls: type[nn.Module] = nn.Linear, **options: Any) -> Solution:
    solution = autopar.parallelize(model(cls), MESH, plan, machine=FAST, example=(X,), **options).solution
    assert solution is not None
    return solution


@pytest.mark.parametrize(
    ("plan", "cls", "options", "claim"),
    [
        (None, nn.Linear, {}, FREE),
        ("search", nn.Linear, {}, FREE),
        (["search"], nn.Linear, {}, FREE),
        (["search", {"weight": (None, None)}], nn.Linear, {}, CONSTRAINED),
        (["search", {"weight": ("?", None)}], nn.Linear, {}, CONSTRAINED),
        (["search", "ddp"], nn.Linear, {}, CONSTRAINED),
        (None, Constrains, {}, CONSTRAINED),
        (None, nn.Linear, {"inputs": "local"}, CONSTRAINED),
    ],
    ids=str,
)
def test_layouts_that_were_given_are_constraints(
    plan: Any, cls: type[nn.Module], options: Any, claim: str, tmp_path: Path
) -> None:
    solution = searched(plan, cls, **options)
    assert solution.certificate.endswith(claim)
    solution.save(tmp_path / "plan.json")
    loaded = load(tmp_path / "plan.json")
    assert loaded.certificate == solution.certificate and loaded == solution
    again = autopar.parallelize(model(cls), MESH, str(tmp_path / "plan.json"), example=(X,), **options).solution
    assert again is not None and again.certificate == solution.certificate


def test_what_is_fixed_is_a_constraint_of_that_plan_alone() -> None:
    solution = searched()
    fixed = solution.fix({"weight": (None, None)})
    assert fixed.certificate.endswith(CONSTRAINED) and fixed.nanoseconds > solution.nanoseconds
    assert fixed.fix({}).certificate.endswith(FREE)  # all else is chosen anew, so it is the first plan
    assert fixed.fix({}).nanoseconds == solution.nanoseconds
    assert searched(["search", {"input": (None, None)}]).fix({}).certificate.endswith(CONSTRAINED)


def test_parameters_that_stay_where_they_are_constrain_the_next_call() -> None:
    parallel = autopar.parallelize(model(), MESH, machine=FAST, example=(X,))
    parallel.simulate(X[:4])
    assert parallel.solution is not None and parallel.solution.certificate.endswith("so nothing is proven")
    with torch.no_grad():
        parallel.simulate(X)
    assert parallel.solution.certificate.endswith(CONSTRAINED)
    other = autopar.parallelize(model(), MESH, searched(), example=(X[:4],)).solution
    assert other is not None and other.certificate.endswith(CONSTRAINED)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).square().mean()


@pytest.mark.parametrize(
    ("plan", "options", "claim"),
    [
        (None, {}, FREE),
        (None, {"zero": "search"}, FREE),
        (None, {"zero": 1}, CONSTRAINED),
        (["search", {"*.weight": (None, None)}], {}, CONSTRAINED),
        (["search", {"*.weight": (None, None)}], {"zero": "search"}, CONSTRAINED),
    ],
    ids=str,
)
def test_of_a_step(plan: Any, options: Any, claim: str) -> None:
    parallel = autopar.parallelize(Loss().double(), Mesh(a=2), plan, machine=SLOW_LINKS)
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=1e-2), **options)
    step.capture(torch.ones(4, 64, dtype=torch.float64))
    assert step.solution is not None and step.solution.certificate.endswith(claim)


@pytest.mark.parametrize(
    ("part", "text"),
    [(0.0, "0.00%"), (1e-12, "0.01%"), (1e-4, "0.01%"), (1.01e-4, "0.02%"), (0.0042, "0.42%"), (0.5, "50.00%"),
     (float("inf"), "inf%")],
)  # fmt: skip
def test_a_part_is_rounded_up(part: float, text: str) -> None:
    assert at_most(part) == text


@pytest.mark.parametrize(
    ("least", "constrained", "claim"),
    [
        (1e9, False, "no plan is cheaper"),
        (1e9 - 2, False, "no plan is more than 0.01% cheaper"),
        (0.9e9, False, "no plan is more than 10.00% cheaper"),
        (0.9e9, True, "no plan with these constraints is more than 10.00% cheaper"),
        (0.0, False, "how much cheaper a plan could be is not known"),
        (0.0, True, "how much cheaper a plan with these constraints could be is not known"),
    ],
)
def test_what_is_proven_in_words(least: float, constrained: bool, claim: str) -> None:
    certificate = Certificate(FAST, 10**9, least, 1.0, "why", constrained=constrained)
    assert certificate.proof == claim and f", and {claim}" in certificate.certificate
