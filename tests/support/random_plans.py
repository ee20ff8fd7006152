"""Enumerate and draw the plans of a program, and price them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np

from autopar.plan.boundary import Boundary
from autopar.search.problem.problem import Problem
from autopar.search.transfer_prices.sharing import union


def choices(problem: Problem) -> list[int]:
    """The variables that make a plan: strategies and homes. Tangents follow from the results."""
    tangents = {problem.variables[node] for node in problem.program.placeholders if node.name.startswith("d_")}
    return [v for v in [*problem.placed, *problem.homes] if v not in tangents]


def count(problem: Problem, variable: int) -> int:
    return len(problem.placed[variable]) if variable in problem.placed else len(problem.homes[variable])


def tie_tangents(problem: Problem, boundary: Boundary, states: np.ndarray) -> None:
    for node, returned in boundary.tangents.items():
        value = problem.value(returned)
        variable = problem.variables[node]
        wanted, _ = next(own for v, home, own, _ in problem.results if v is value and home is None)[
            states[value.variable]
        ]
        states[variable] = problem.homes[variable].index(wanted)


def plans(problem: Problem, boundary: Boundary) -> Iterator[np.ndarray]:
    free = choices(problem)
    for chosen in itertools.product(*(range(count(problem, v)) for v in free)):
        states = np.zeros(len(problem.graph.costs), dtype=np.int64)
        states[free] = chosen
        tie_tangents(problem, boundary, states)
        yield states


def random_plan(problem: Problem, boundary: Boundary, draw: random.Random) -> np.ndarray:
    states = np.zeros(len(problem.graph.costs), dtype=np.int64)
    for v in choices(problem):
        states[v] = draw.randrange(count(problem, v))
    tie_tangents(problem, boundary, states)
    return states


def near_plan(problem: Problem, boundary: Boundary, plan: np.ndarray, draw: random.Random) -> np.ndarray:
    """Change one to four choices of a plan."""
    states = plan.copy()
    for v in draw.sample(choices(problem), draw.randint(1, 4)):
        states[v] = draw.randrange(count(problem, v))
    tie_tangents(problem, boundary, states)
    return states


class Prices:
    """``Problem.explicit_price`` of many plans: the transfers of a value are added up once for each of its states."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.known: dict[tuple[int, ...], int] = {}

    def __call__(self, states: np.ndarray) -> int:
        plan = states.tolist()
        if self.problem.views_of_reduced(plan):
            return self.problem.explicit_price(plan)
        total = sum(int(prices[plan[v]]) for v, prices in self.problem.prices.items()) + self.problem.places(plan)
        for number, value in enumerate(self.problem.values.values()):
            key = (number, plan[value.variable], *[plan[reader.variable] for reader in value.readers])
            if key not in self.known:
                self.known[key] = union(value.paths(self.problem.chains, plan))
            total += self.known[key]
        return total
