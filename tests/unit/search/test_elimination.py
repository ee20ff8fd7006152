"""The minimum and the best assignments stay when variables are eliminated, and equal ones are eliminated once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from factor_graphs import Case, all_costs, assignments, cases
from hypothesis import given, settings

from autopar.search.solver import elimination
from autopar.search.solver.elimination import Eliminated
from autopar.search.solver.factor_graph import Array, FactorGraph


def rest_of(reduced: Eliminated) -> Array:
    """Return the cost of each assignment after elimination; that of eliminated variables does not count any more."""
    graph = FactorGraph(edges=reduced.graph.edges)
    for v, costs in enumerate(reduced.graph.costs):
        graph.add_variable("", costs if v in reduced.left else np.zeros(len(costs)))
    return reduced.constant + all_costs(graph)


@settings(deadline=None, max_examples=40)
@given(cases())
def test_the_minimum_stays(case: Case) -> None:
    reduced = Eliminated(case.graph)
    assert rest_of(reduced).min() == case.costs.min()


@settings(deadline=None, max_examples=40)
@given(cases())
def test_what_is_left_has_three_neighbours(case: Case) -> None:
    reduced = Eliminated(case.graph)
    degrees = Counter(v for ends in reduced.graph.edges for v in ends)
    assert sorted(degrees) == reduced.left
    assert all(degree > 2 for degree in degrees.values())


@settings(deadline=None, max_examples=40)
@given(cases())
def test_the_best_states_of_the_others_are_added(case: Case) -> None:
    reduced = Eliminated(case.graph)
    rest = rest_of(reduced)
    for states in assignments(case.graph, count=10):
        full = reduced.completed(states)
        assert (full[reduced.left] == states[reduced.left]).all()
        fixed = tuple(int(x) if v in reduced.left else slice(None) for v, x in enumerate(states))
        assert case.costs[tuple(full)] == rest[tuple(states)] == case.costs[fixed].min()


def test_the_graph_itself_stays() -> None:
    graph = FactorGraph()
    for name in "xyz":
        graph.add_variable(name, [1, 2])
    graph.add_edge(0, 1, np.arange(2), np.arange(2), np.eye(2))
    graph.add_edge(1, 2, np.arange(2), np.arange(2), np.eye(2))
    costs, edges = list(graph.costs), dict(graph.edges)
    assert Eliminated(graph).constant == 4
    assert all(a is b for a, b in zip(graph.costs, costs, strict=True))
    assert graph.edges == edges


def equal_parts(count: int) -> FactorGraph:
    """Four variables that all have edges, each with a leaf, and two with a path between them; so often."""
    graph = FactorGraph()
    two = np.arange(2)
    for _ in range(count):
        v = [graph.add_variable("v", [0, k]) for k in range(9)]
        for i in range(4):
            for j in range(i):
                graph.add_edge(v[i], v[j], two, two, np.array([[i, 1.0], [2.0, j]]))
            graph.add_edge(v[i], v[4 + i], two, two, np.array([[0.0, 3.0], [i, 1.0]]))
        graph.add_edge(v[0], v[8], two, two, np.array([[0.0, 5.0], [6.0, 2.0]]))
        graph.add_edge(v[1], v[8], two, two, np.array([[3.0, 5.0], [6.0, 0.0]]))
    return graph


def test_equal_parts_are_eliminated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    least_by = elimination.least_by
    monkeypatch.setattr(elimination, "least_by", lambda *given: calls.append(given) or least_by(*given))
    one = Eliminated(equal_parts(1))
    assert len(one.left) == 4
    assert (once := len(calls)) == 5  # four leaves and a path
    many = Eliminated(equal_parts(6))
    assert len(many.steps) == 6 * len(one.steps)
    assert len(calls) == 2 * once
    assert len({id(many.graph.costs[v]) for v in many.left}) == len({id(one.graph.costs[v]) for v in one.left})


def test_graphs_can_share_what_was_eliminated() -> None:
    memo: dict[object, Array] = {}
    graph = equal_parts(1)
    first = Eliminated(graph, memo)
    known = dict(memo)
    second = Eliminated(graph, memo)
    assert memo == known
    assert len(known) == 5
    assert all(a is b for a, b in zip(first.graph.costs, second.graph.costs, strict=True))


@settings(deadline=None, max_examples=20)
@given(cases())
def test_large_tables_are_not_made(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elimination, "MOST", 0)
        reduced = Eliminated(case.graph)
    assert all(len(step.edges) < 2 for step in reduced.steps)
    assert rest_of(reduced).min() == case.costs.min()
