"""The least cost of random graphs, found and proven, also in chains of equal blocks."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from factor_graphs import Case, Chain, Model, case_of, cases, chain_of, dense_cases, least_cost, models
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.solver import exact, solver
from autopar.search.solver.factor_graph import FactorGraph
from autopar.search.solver.solver import Answer, solve


def answer_of(graph: FactorGraph, labels: list[str] | None = None, deadline: float = np.inf) -> Answer:
    count = len(graph.costs)
    answer = solve(graph, range(count), [""] * count if labels is None else labels, deadline)
    assert graph.energy(answer.states) == answer.cost
    return answer


@pytest.mark.simulated
@settings(deadline=None, max_examples=30)
@given(st.one_of(cases(), dense_cases()))
def test_small_graphs_are_solved_exactly(case: Case) -> None:
    answer = answer_of(case.graph)
    assert answer.cost == answer.bound == case.costs.min() == case.costs[tuple(answer.states)]
    assert answer.exact


def test_a_graph_without_variables_costs_nothing() -> None:
    answer = solve(FactorGraph(), [], [])
    assert (answer.cost, answer.bound, len(answer.states)) == (0, 0, 0)


def frustrated(count: int) -> FactorGraph:
    """Variables of two states; each pair of equal ones costs 1. Messages prove no more than nothing."""
    graph, two = FactorGraph(), np.arange(2)
    for _ in range(count):
        graph.add_variable("x", [0, 0])
    for i, j in itertools.combinations(range(count), 2):
        graph.add_edge(i, j, two, two, np.eye(2))
    return graph


def test_a_bound_of_zero_rises() -> None:
    answer = answer_of(frustrated(5), deadline=time.monotonic() + 5)
    assert answer.cost == answer.bound == 4


def test_a_state_without_rows_of_a_table_is_no_trouble() -> None:
    """A table may have more rows than its variable has states."""
    graph = FactorGraph()
    for _ in range(4):
        graph.add_variable("x", [0, 1, 2])
    for i, j in itertools.combinations(range(4), 2):
        graph.add_edge(i, j, np.array([3, 1, 1]), np.array([0, 2, 4]), np.arange(25.0).reshape(5, 5))
    answer = answer_of(graph)
    assert answer.exact
    assert answer.cost == least_cost(graph)


@pytest.mark.simulated
@settings(deadline=None, max_examples=10)
@given(st.builds(chain_of, st.integers(0, 2**32 - 1), st.integers(7, 12), st.integers(2, 3)))
def test_chains_of_equal_blocks_are_solved_exactly(chain: Chain) -> None:
    answer = answer_of(chain.graph, chain.labels)
    assert answer.cost == answer.bound == least_cost(chain.graph)


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(models())
def test_models_with_runs_are_solved_exactly(model: Model) -> None:
    """Outer variables, uneven blocks, one or two stacks; also as if no block had a label."""
    answer = answer_of(model.graph, model.labels)
    assert answer.cost == answer.bound == least_cost(model.graph)
    assert answer_of(model.graph).cost == answer.cost


def test_deep_chains_are_solved_exactly() -> None:
    """The price of a block more is the same at any depth, once the chain is long."""
    costs = []
    for count in (40, 100, 103, 1000, 1003):
        chain = chain_of(5, count, 2)
        answer = answer_of(chain.graph, chain.labels)
        assert answer.exact
        costs.append(answer.cost)
    assert costs[0] == least_cost(chain_of(5, 40, 2).graph)
    assert costs[2] - costs[1] == costs[4] - costs[3]


def test_chains_of_equal_blocks_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    folded = solver.Folded
    monkeypatch.setattr(solver, "Folded", lambda *given: made.append(folded(*given)) or made[-1])
    chain = chain_of(1, 12, 3)
    answer_of(chain.graph, chain.labels)
    ((short,),) = [made]
    assert len(short.variables) < len(chain.labels)


@pytest.mark.parametrize("kind", ["dense", "chain"])
def test_after_the_deadline_the_best_so_far_is_the_answer(kind: str) -> None:
    for seed in range(4):
        if kind == "dense":
            case = case_of(seed, [4] * 6, list(itertools.combinations(range(6), 2)), 1000)
            least, answer = case.costs.min(), answer_of(case.graph, deadline=time.monotonic() - 1)
        else:
            chain = chain_of(seed, 9, 3)
            least, answer = least_cost(chain.graph), answer_of(chain.graph, chain.labels, time.monotonic() - 1)
        assert 0 < answer.bound <= least <= answer.cost < np.inf
        assert answer.exact == (answer.cost == answer.bound)


@pytest.mark.parametrize("limit", ["ROWS", "MOST_STATES"])
def test_what_is_too_large_gets_an_answer_and_a_bound(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact if limit == "ROWS" else solver, limit, 4)
    inexact = 0
    for seed in range(6):
        case = case_of(seed, [4] * 6, list(itertools.combinations(range(6), 2)), 1000)
        answer = answer_of(case.graph)
        assert 0 < answer.bound <= case.costs.min() <= answer.cost < np.inf
        inexact += not answer.exact
    assert inexact


def test_variables_may_have_names_and_an_order_of_their_own() -> None:
    case = case_of(3, [3] * 5, list(itertools.combinations(range(5), 2)), 1000)
    orders = [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [0, 0, 0, 1, 1], [0.5, 7, 2, 2.5, -1]]
    assert {solve(case.graph, order, [""] * 5).cost for order in orders} == {case.costs.min()}


SOLVE = """
from factor_graphs import case_of, chain_of
from autopar.search.solver.solver import solve
import itertools
chain, case = chain_of(1, 9, 3), case_of(2, [4] * 6, list(itertools.combinations(range(6), 2)), 1)
for graph, labels in [(chain.graph, chain.labels), (case.graph, [""] * 6)]:
    answer = solve(graph, range(len(labels)), labels)
    print(answer.states.tolist(), answer.cost, answer.bound)
"""


@pytest.mark.long
def test_the_answer_does_not_depend_on_hashes() -> None:
    """Also among equal costs, since all ranks must make the same program."""
    root = Path(__file__).parents[3]
    paths = os.pathsep.join([str(root), str(root / "tests" / "support")])
    answers = {
        subprocess.run(
            [sys.executable, "-c", SOLVE],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    (answer,) = answers
    assert len(answer.splitlines()) == 2
