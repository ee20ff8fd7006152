"""Messages move costs and change none, and the bound that they prove is below the minimum."""

from __future__ import annotations

import numpy as np
from factor_graphs import Case, all_costs, case_of, cases, dense, dense_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.solver.factor_graph import Edge, FactorGraph
from autopar.search.solver.message_passing import GRAIN, MessagePassing


def passing_of(graph: FactorGraph, seed: int) -> MessagePassing:
    """Pass messages in a random order, in which some variables stand at one place."""
    count = len(graph.costs)
    return MessagePassing(graph, range(count), np.random.default_rng(seed).integers(0, count, count).tolist())


def moved(passing: MessagePassing) -> FactorGraph:
    """Return the graph with all messages moved: variable k is the one at place k."""
    graph = FactorGraph()
    for place in range(len(passing.costs)):
        graph.add_variable("", passing.reparametrised(place))
    for link in passing.links:
        graph.add_edge(link.lower, link.upper, link.left, link.right, link.rest())
    return graph


@settings(deadline=None, max_examples=40)
@given(st.one_of(cases(), dense_cases()), st.integers(0, 99), st.integers(0, 8))
def test_messages_keep_the_cost_of_each_assignment(case: Case, seed: int, passes: int) -> None:
    passing = passing_of(case.graph, seed)
    passing.run(passes)
    assert (all_costs(moved(passing)) == case.costs.transpose(passing.variables)).all()
    for link in passing.links:
        for give in (link.to_lower, link.to_upper):
            assert (give * GRAIN == np.round(give * GRAIN)).all()


@settings(deadline=None, max_examples=40)
@given(st.one_of(cases(), dense_cases()), st.integers(0, 99))
def test_the_bound_is_the_sum_of_least_costs_and_below_the_minimum(case: Case, seed: int) -> None:
    passing = passing_of(case.graph, seed)
    bound = -np.inf
    for _ in range(6):
        passing.run(1)
        graph = moved(passing)
        present = sum(costs.min() for costs in graph.costs) + sum(dense(edge).min() for edge in graph.edges.values())
        assert passing.bound - passing.lost == present
        assert 0 <= passing.lost <= 100 / GRAIN
        assert bound <= passing.bound <= case.costs.min()
        bound = passing.bound


@settings(deadline=None, max_examples=30)
@given(cases(tree=True), st.integers(0, 99))
def test_a_tree_gets_its_minimum(case: Case, seed: int) -> None:
    passing = passing_of(case.graph, seed)
    passing.run(60)
    assert case.costs.min() - passing.bound < 100 / GRAIN  # each message is rounded


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 4), min_size=1, max_size=7))
def test_a_path_gets_its_minimum_in_one_pass(seed: int, states: list[int]) -> None:
    case = case_of(seed, states, [(k, k + 1) for k in range(len(states) - 1)], 1000)
    passing = MessagePassing(case.graph, range(len(states)), range(len(states)))
    passing.run(1)
    assert passing.bound == case.costs.min()
    assert case.costs[tuple(passing.decoded())] == passing.bound


@settings(deadline=None, max_examples=30)
@given(st.one_of(cases(), dense_cases()), st.integers(0, 99), st.integers(1, 4))
def test_the_collected_costs_of_a_state_bound_its_assignments(case: Case, seed: int, passes: int) -> None:
    passing = passing_of(case.graph, seed)
    passing.run(passes)
    for place, variable in enumerate(passing.variables):
        others = tuple(v for v in range(case.costs.ndim) if v != variable)
        collected = passing.collected(place)
        present = passing.bound - passing.lost
        assert (present + collected - collected.min() <= case.costs.min(axis=others)).all()


def test_only_edges_between_its_variables_count() -> None:
    graph = FactorGraph()
    for name in "xyz":
        graph.add_variable(name, [1, 2])
    for i, j in [(0, 1), (1, 2), (0, 2)]:
        graph.add_edge(i, j, np.arange(2), np.arange(2), np.full((2, 2), 10.0))
    passing = MessagePassing(graph, [2, 0], [5, 0, 4])
    passing.run(2)
    assert passing.bound == 12
    assert [passing.name(place) for place in range(2)] == ["z", "x"]
    assert [passing.original(place) for place in range(2)] == [2, 0]
    passing = MessagePassing(graph, [2, 0], [5, 0, 4], [7, 8, 9])
    assert [passing.original(place) for place in range(2)] == [9, 7]


def test_more_passes_raise_the_bound() -> None:
    """Or this room would prove little: here one pass proves less than the minimum, and more prove it."""
    case = next(
        case
        for case in (case_of(seed, [3] * 5, [(i, j) for i in range(5) for j in range(i)], 1000) for seed in range(50))
        if bound_after(case, 1) < bound_after(case, 100) > case.costs.min() - 1e-3
    )
    assert bound_after(case, 0) == -np.inf


def bound_after(case: Case, passes: int) -> float:
    passing = passing_of(case.graph, 0)
    passing.run(passes)
    return passing.bound


def test_dense_tables_have_what_the_edge_says() -> None:
    edge = Edge(np.array([0, 1, 0]), np.array([1, 0]), np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert dense(edge).tolist() == [[2, 1], [4, 3], [2, 1]]


@settings(deadline=None, max_examples=20)
@given(cases(), st.integers(1, 4))
def test_messages_can_be_carried_on(case: Case, passes: int) -> None:
    every = range(len(case.graph.costs))
    first, second = (MessagePassing(case.graph, every, every) for _ in range(2))
    first.run(passes)
    second.start(first.messages())
    assert all((first.reparametrised(v) == second.reparametrised(v)).all() for v in every)
    first.run(1)
    second.run(1)
    assert first.messages().keys() == second.messages().keys()
    assert all((first.messages()[ends] == message).all() for ends, message in second.messages().items())
