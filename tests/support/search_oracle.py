"""Compare a search with the enumeration of all plans of a small program, and with random plans."""

from __future__ import annotations

import math
import random

import numpy as np
from random_plans import Prices, choices, count, plans, random_plan
from searched import price

from autopar import Mesh, Program
from autopar.costs.machine import Machine
from autopar.plan.boundary import Boundary
from autopar.search.problem.build import build
from autopar.search.problem.problem import Problem
from autopar.search.search import search
from autopar.search.solutions.found import Found, _layouts

MOST = 20_000  # plans that are enumerated


def price_of_plan(problem: Problem, mesh: Mesh, machine: Machine, states: np.ndarray) -> int:
    """The price of the explicit program of a plan."""
    types, uses = _layouts(problem, states)
    return price(
        problem.program,
        mesh,
        machine,
        Found(machine, 0, 0.0, 0.0, "", types, uses, inside=problem.inside(states.tolist())),
    )


def check(program: Program, mesh: Mesh, machine: Machine, seed: object) -> bool:
    """Compare with all plans; ``False`` if these are too many."""
    boundary = Boundary(program, mesh)
    problem = build(boundary, machine)
    if math.prod(count(problem, v) for v in choices(problem)) > MOST:
        return False
    found, prices = search(boundary, machine), Prices(problem)
    least = min(prices(states) for states in plans(problem, boundary))
    assert found.least <= least + 1e-6, (seed, "the bound is above the best plan")
    if max(len(value.readers) for value in problem.values.values()) <= 3:  # otherwise the bound may lie below
        assert found.nanoseconds == least and found.exact, (seed, found.nanoseconds, found.least, least)
    assert price(program, mesh, machine, found) == found.nanoseconds, seed
    draw = random.Random(0)
    for _ in range(3):
        states = random_plan(problem, boundary, draw)
        assert prices(states) == price_of_plan(problem, mesh, machine, states), (seed, states.tolist())
    return True
