"""The exact minimum of small graphs, the slack, and the limits of tables."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from factor_graphs import Case, all_costs, cases, dense_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.solver import exact
from autopar.search.solver.exact import Minimised, Rows, TooManyRows, factors_of, join, rows_of, solve_exactly
from autopar.search.solver.factor_graph import Array, FactorGraph


@settings(deadline=None, max_examples=30)
@given(cases(5), st.data())
def test_factors_are_at_least_zero_and_sum_to_the_costs(case: Case, data: st.DataObject) -> None:
    constant, factors = factors_of(case.graph)
    assert all(factor.costs.min() == 0 for factor in factors)
    states = tuple(data.draw(st.integers(0, size - 1)) for size in case.costs.shape)
    assert constant + cost_of(factors, states) == case.costs[states]


def cost_of(factors: list[Rows], states: tuple[int, ...]) -> float:
    """Return the cost of an assignment; infinite if a factor has no row for it."""
    total = 0.0
    for factor in factors:
        fits = (factor.states == [states[v] for v in factor.variables]).all(axis=1)
        assert fits.sum() < 2
        total += float(factor.costs[fits].sum()) if fits.any() else np.inf
    return total


@settings(deadline=None, max_examples=40)
@given(st.one_of(cases(), dense_cases(6)), st.floats(0, 3))
def test_the_least_cost_within_the_slack_is_found(case: Case, share: float) -> None:
    constant, factors = factors_of(case.graph)
    least = case.costs.min() - constant
    slack = share * least
    found = solve_exactly(factors, range(case.costs.ndim), slack)
    assert (found is None) == (least > slack)
    if found is not None:
        cost, states = found
        assert cost == least
        assert sorted(states) == list(range(case.costs.ndim))
        assert case.costs[tuple(states[v] for v in range(case.costs.ndim))] == case.costs.min()


def test_the_slack_itself_is_affordable() -> None:
    graph = FactorGraph()
    for name in "xy":
        graph.add_variable(name, [0, 3])
    graph.add_edge(0, 1, np.arange(2), np.arange(2), np.array([[9.0, 9.0], [9.0, 0.0]]))
    _, factors = factors_of(graph)
    assert solve_exactly(factors, range(2), 6) == (6, {0: 1, 1: 1})
    assert solve_exactly(factors, range(2), 5.5) is None


def test_parts_without_a_connection_share_the_slack() -> None:
    """Each of them is within the slack, and both together are not."""
    factors = [rows_of((v,), np.array([[0], [1]]), np.array([4.0, 5.0])) for v in range(2)]
    assert solve_exactly(factors, range(2), 7) is None
    assert solve_exactly(factors, range(2), 8) == (8, {0: 0, 1: 0})


@settings(deadline=None, max_examples=40)
@given(cases(6), st.floats(0, 3), st.data())
def test_the_others_keep_their_least_costs_within_the_slack(case: Case, share: float, data: st.DataObject) -> None:
    count = case.costs.ndim
    eliminated = data.draw(st.sets(st.integers(0, count - 1)))
    others = [v for v in range(count) if v not in eliminated]
    constant, factors = factors_of(case.graph)
    slack = share * (case.costs.min() - constant)
    done = Minimised(factors, sorted(eliminated), slack)
    assert not any(eliminated & set(factor.variables) for factor in done.rest)
    costs = all_costs(case.graph) - constant
    for fixed in itertools.islice(itertools.product(*(range(costs.shape[v]) for v in others)), 40):
        place = dict(zip(others, fixed, strict=True))
        of_rest = costs[tuple(place.get(v, slice(None)) for v in range(count))].min()
        states = tuple(place.get(v, -1) for v in range(count))
        if of_rest > slack:
            assert not done.feasible or done.constant + cost_of(done.rest, states) > slack
        else:
            assert done.feasible
            assert done.constant + cost_of(done.rest, states) == of_rest
            done.complete(place)
            assert costs[tuple(place[v] for v in range(count))] == of_rest


def test_an_infeasible_part_ends_the_work() -> None:
    factors = [rows_of((v,), np.array([[0], [1]]), np.array([4.0, 5.0])) for v in range(2)]
    assert not Minimised(factors, range(2), 3).feasible
    assert not Minimised(factors, [0], 3).feasible
    assert not Minimised(factors, range(2), 7).feasible
    assert Minimised(factors, range(2), 8).feasible
    assert Minimised(factors, [0], 4).feasible


def even(count: int) -> list[Rows]:
    """A factor for each pair of four variables, in which all pairs of states cost nothing."""
    grid = np.indices((count, count)).reshape(2, -1).T
    return [rows_of(pair, grid, np.zeros(len(grid))) for pair in itertools.combinations(range(4), 2)]


def test_too_many_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert solve_exactly(even(4), range(4), 0) is not None
    monkeypatch.setattr(exact, "ROWS", 4**4)
    assert solve_exactly(even(4), range(4), 0) is not None
    monkeypatch.setattr(exact, "ROWS", 4**4 - 1)
    with pytest.raises(TooManyRows):
        solve_exactly(even(4), range(4), 0)
    monkeypatch.setattr(exact, "ROWS", 4)
    with pytest.raises(TooManyRows):  # before the rows are made
        join(even(4), 0)


def test_only_affordable_rows_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table may have few of many possible rows."""
    monkeypatch.setattr(exact, "ROWS", 4)
    dear = [rows_of(f.variables, f.states, (f.states[:, 0] != f.states[:, 1]) * 10.0) for f in even(4)]
    assert solve_exactly(dear, range(4), 9) == (0, {0: 0, 1: 0, 2: 0, 3: 0})
    with pytest.raises(TooManyRows):
        solve_exactly(dear, range(4), 40)


WIDE = 70  # variables: their joint states have no numbers of 64 bits


def wide(*changed: int) -> Array:
    """Rows of zeros, and one more for each of some variables, which has 1 there."""
    states = np.zeros((1 + len(changed), WIDE), dtype=np.int32)
    states[range(1, 1 + len(changed)), list(changed)] = 1
    return states


def test_joint_states_of_many_variables_differ() -> None:
    """Here rows differ only in the first variables."""
    ones = rows_of(tuple(range(WIDE)), np.ones((1, WIDE), dtype=np.int32), np.array([9.0]))
    table = rows_of(tuple(range(WIDE)), np.concatenate([wide(0, 1), ones.states]), np.array([1.0, 2.0, 3.0, 9.0]))
    done = Minimised([table], [WIDE - 1], 10)
    (rest,) = done.rest
    assert sorted((rest.costs + done.constant).tolist()) == [1, 2, 3, 9]
    joined = join([table, table], 20)
    assert sorted(joined.costs.tolist()) == [2, 4, 6, 18]
