"""The cost of an assignment, edges that are added twice, and tables that equal parts share."""

from __future__ import annotations

import numpy as np
import pytest
from factor_graphs import Case, assignments, cases, dense
from hypothesis import given, settings

from autopar.search.solver.factor_graph import FactorGraph, Interned


@settings(deadline=None, max_examples=30)
@given(cases())
def test_an_assignment_costs_what_was_added(case: Case) -> None:
    for states in assignments(case.graph):
        assert case.graph.energy(states) == case.costs[tuple(states)]


def test_an_assignment_has_a_state_for_each_variable() -> None:
    graph = FactorGraph()
    graph.add_variable("x", [1, 2])
    with pytest.raises(ValueError, match=r"shorter|longer"):
        graph.energy(np.array([0, 1]))


def test_edges_of_one_pair_are_summed_in_both_directions() -> None:
    graph = FactorGraph()
    for name in "xy":
        graph.add_variable(name, [0, 0, 0])
    graph.add_edge(0, 1, np.array([0, 1, 1]), np.array([0, 0, 1]), np.array([[1.0, 2.0], [3.0, 4.0]]))
    graph.add_edge(1, 0, np.array([0, 1, 0]), np.array([0, 1, 2]), np.array([[10.0, 20.0, 30.0], [40.0, 50.0, 60.0]]))
    ((ends, edge),) = graph.edges.items()
    assert ends == (0, 1)
    assert dense(edge).tolist() == [[11, 41, 12], [23, 53, 24], [33, 63, 34]]


def test_states_that_cost_the_same_in_both_edges_share_a_row() -> None:
    graph = FactorGraph()
    for name in "xy":
        graph.add_variable(name, [0, 0, 0, 0])
    numbers = np.array([0, 1, 1, 0])
    for _ in range(2):
        graph.add_edge(0, 1, numbers, numbers, np.eye(2))
    assert graph.edges[0, 1].table.tolist() == [[2, 0], [0, 2]]


def test_rows_that_no_state_has_are_left_out() -> None:
    graph = FactorGraph()
    for name in "xy":
        graph.add_variable(name, [0, 0])
    table = np.arange(12.0).reshape(3, 4)
    graph.add_edge(0, 1, np.array([2, 0]), np.array([1, 2]), table)
    edge = graph.edges[0, 1]
    assert dense(edge).tolist() == [[9, 10], [1, 2]]
    assert edge.table.shape == (2, 2)


def test_equal_contents_are_one_array() -> None:
    intern = Interned()
    first = intern(np.array([1.0, 2.0]))
    assert intern(np.array([1.0, 2.0])) is first
    assert intern(np.array([[1.0], [2.0]])[:, 0]) is first
    assert intern(np.array([[1.0, 2.0]])) is not first
    assert intern(np.array([1, 2])) is not first
    assert intern(np.array([2.0, 1.0])) is not first
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 3


def test_equal_parts_of_a_graph_share_their_arrays() -> None:
    graph = FactorGraph()
    numbers, table = np.array([0, 0, 1]), np.array([[1.0, 2.0], [3.0, 4.0]])
    for _ in range(4):
        graph.add_variable("x", [3, 1, 2])
    for i, j in [(0, 1), (2, 3)]:
        graph.add_edge(i, j, numbers.copy(), numbers.copy(), table.copy())
        graph.add_edge(j, i, numbers.copy(), np.array([1, 0, 0]), table.copy())
    assert len({id(costs) for costs in graph.costs}) == 1
    assert all(a is b for a, b in zip(graph.edges[0, 1], graph.edges[2, 3], strict=True))
