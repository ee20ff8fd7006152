"""Problems from which states were left out, beside the whole ones."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from random_plans import Prices, random_plan
from random_traced import random_traced
from searched import MACHINES, price, traced

from autopar import Mesh
from autopar.capture import capture
from autopar.plan.boundary import Boundary
from autopar.search.problem import narrowing
from autopar.search.problem.build import build
from autopar.search.problem.narrowing import is_wide
from autopar.search.search import search

MESH = Mesh(a=2, b=2, c=2)
H100 = MACHINES[-1]


@pytest.fixture
def all_wide() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrowing, "PAIRS", -1)
        yield patch


def mlp(width: int) -> Boundary:
    model = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))
    return Boundary(capture(model, (torch.randn(512, width),), {}).program, MESH)


@pytest.mark.long
@pytest.mark.parametrize("first", [0, pytest.param(4, marks=pytest.mark.sweep("more programs of the same kind"))])
def test_the_bound_of_a_narrowed_problem_holds_for_all_plans(all_wide: pytest.MonkeyPatch, first: int) -> None:
    exact = 0
    for seed in range(first, first + 4):
        draw = random.Random(seed)
        program = traced(random_traced(draw, draw.randint(2, 3), (64, 64)))
        boundary, machine = Boundary(program, MESH), MACHINES[seed % len(MACHINES)]
        narrowed = search(boundary, machine)
        all_wide.setattr(narrowing, "PAIRS", 10**9)
        whole, problem = search(boundary, machine), build(boundary, machine)
        prices = Prices(problem)
        assert all(narrowed.least <= prices(random_plan(problem, boundary, draw)) for _ in range(20))
        all_wide.setattr(narrowing, "PAIRS", -1)
        assert problem.floor is None and whole.exact
        assert narrowed.least <= whole.nanoseconds <= narrowed.nanoseconds, seed
        assert price(program, MESH, machine, narrowed) == narrowed.nanoseconds
        exact += narrowed.exact
    assert exact


@pytest.mark.long
def test_an_mlp_with_biases_is_solved_exactly() -> None:
    boundary = mlp(1024)
    problem, found = build(boundary, H100), search(boundary, H100)
    assert problem.floor is not None and max(map(len, problem.placed.values())) <= 2 * narrowing.STATES
    assert found.exact and price(boundary.program, MESH, H100, found) == found.nanoseconds


def test_problems_on_two_axes_stay_whole(all_wide: pytest.MonkeyPatch) -> None:
    program = traced(random_traced(random.Random(0), 2, (64, 64)))
    for mesh in (Mesh(a=2, b=2), Mesh(a=2, b=2, c=1), Mesh(a=3, b=2, c=2), MESH):
        problem = build(Boundary(program, mesh), H100)
        assert is_wide(problem) == (mesh is MESH) == (problem.floor is not None)
