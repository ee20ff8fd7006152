"""The solver beside HiGHS, an independent solver: on random graphs, an MLP and a Llama."""

from __future__ import annotations

import numpy as np
import pytest
from factor_graphs import Case, dense_cases, least_cost
from hypothesis import given, settings
from linear_program import least_cost as by_highs
from searched import MACHINES
from searched_programs import on_meta

from autopar import Mesh
from autopar.plan.boundary import Boundary
from autopar.search.problem.build import build
from autopar.search.solver.elimination import Eliminated
from autopar.search.solver.factor_graph import FactorGraph
from autopar.search.solver.message_passing import MessagePassing
from autopar.search.solver.solver import solve

TOLERANCE = 1e-6  # relative, of HiGHS


def messages(graph: FactorGraph) -> float:
    """The bound of messages alone, without the search for an exact answer."""
    reduced = Eliminated(graph)
    if not reduced.left:
        return reduced.constant
    passing = MessagePassing(reduced.graph, reduced.left, range(len(graph.costs)))
    passing.run(200)
    return passing.bound + reduced.constant


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(dense_cases())
def test_small_graphs(case: Case) -> None:
    answer = solve(case.graph, range(len(case.graph.costs)), [""] * len(case.graph.costs))
    assert answer.cost == pytest.approx(by_highs(case.graph, whole=True), rel=TOLERANCE, abs=TOLERANCE)
    relaxed = by_highs(case.graph, whole=False)
    assert messages(case.graph) <= relaxed + TOLERANCE * max(1.0, relaxed)
    assert relaxed <= answer.cost + TOLERANCE * max(1.0, relaxed)


def test_the_relaxation_of_a_triangle_is_not_its_least_cost() -> None:
    """Two of three variables of two states are equal, which costs 1; the relaxation pays nothing."""
    graph, two = FactorGraph(), np.arange(2)
    for name in "abc":
        graph.add_variable(name, [0, 0])
    for i, j in ((0, 1), (0, 2), (1, 2)):
        graph.add_edge(i, j, two, two, np.eye(2))
    assert by_highs(graph, whole=False) == pytest.approx(0, abs=TOLERANCE)
    assert by_highs(graph, whole=True) == pytest.approx(1) == least_cost(graph)


ONE_AXIS = pytest.mark.sweep("mlp on one axis has this machine")


@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh", "machine"), [
    *(("mlp", Mesh(a=2), machine) for machine in MACHINES),
    ("mlp", Mesh(a=2, b=2), MACHINES[-1]), ("llama", Mesh(a=2), MACHINES[0]),
    *(pytest.param("mlp", Mesh(a=2, b=2), machine, marks=ONE_AXIS) for machine in MACHINES[:-1]),
    *(pytest.param("llama", Mesh(a=2), machine, marks=ONE_AXIS) for machine in MACHINES[1:]),
], ids=lambda value: getattr(value, "name", str(value)))  # fmt: skip
def test_models(name: str, mesh: Mesh, machine: object) -> None:
    problem = build(Boundary(on_meta(name), mesh), machine)
    answer = solve(problem.graph, problem.order, problem.labels)
    assert answer.exact
    relaxed = by_highs(problem.graph, whole=False)
    assert messages(problem.graph) <= relaxed * (1 + TOLERANCE)
    assert relaxed <= answer.cost * (1 + TOLERANCE)
    assert by_highs(problem.graph, whole=True) == pytest.approx(answer.cost, rel=TOLERANCE)
