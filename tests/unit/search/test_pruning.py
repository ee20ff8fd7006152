"""No assignment within the slack is lost, and those that are kept cost what they did."""

from __future__ import annotations

import itertools

import numpy as np
from factor_graphs import Case, case_of, cases, dense_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.solver.factor_graph import FactorGraph
from autopar.search.solver.message_passing import MessagePassing
from autopar.search.solver.pruning import affordable, restricted


def passing_of(case: Case, passes: int) -> MessagePassing:
    count = case.costs.ndim
    passing = MessagePassing(case.graph, range(count), np.random.default_rng(count).permutation(count).tolist())
    passing.run(passes)
    return passing


def check_kept(case: Case, passing: MessagePassing, slack: float) -> None:
    kept = affordable(passing, slack)
    for states in np.argwhere(case.costs <= passing.bound + slack):
        assert all(states[v] in kept[place] for place, v in enumerate(passing.variables))


@settings(deadline=None, max_examples=40)
@given(st.one_of(cases(), dense_cases(6)), st.integers(1, 6), st.floats(0, 1))
def test_no_assignment_within_the_slack_is_lost(case: Case, passes: int, share: float) -> None:
    passing = passing_of(case, passes)
    wanted = np.sort(case.costs, axis=None)[int(share**4 * (case.costs.size - 1))]  # the cost of some assignment
    check_kept(case, passing, wanted - passing.bound)


def test_no_assignment_is_lost_with_a_grain_that_a_pass_lost() -> None:
    """Rounded shares may lower what the messages prove; the best bound, which the slack is counted from, stays."""
    seen = 0
    for seed in range(60):
        case = case_of(seed, [3] * 5, list(itertools.combinations(range(5), 2)), 5)
        passing = passing_of(case, 0)
        for _ in range(12):
            passing.run(1)
            if passing.lost:
                seen += 1
                check_kept(case, passing, case.costs.min() - passing.bound)
    assert seen


def test_states_beyond_the_slack_are_dropped() -> None:
    graph = FactorGraph()
    for name in "xy":
        graph.add_variable(name, [0, 10, 20])
    graph.add_edge(0, 1, np.array([0, 0, 1]), np.arange(3), np.array([[0.0, 5.0, 5.0], [0.0, 0.0, 0.0]]))
    passing = MessagePassing(graph, range(2), range(2))
    passing.run(1)
    assert [states.tolist() for states in affordable(passing, 0)] == [[0], [0]]
    assert affordable(passing, 9)[0].tolist() == [0]
    assert affordable(passing, 10)[0].tolist() == [0, 1]
    assert affordable(passing, 19)[0].tolist() == [0, 1]
    assert [states.tolist() for states in affordable(passing, 25)] == [[0, 1, 2], [0, 1, 2]]


@settings(deadline=None, max_examples=40)
@given(st.one_of(cases(), dense_cases(6)), st.integers(1, 3), st.data())
def test_kept_assignments_cost_what_they_did(case: Case, passes: int, data: st.DataObject) -> None:
    passing = passing_of(case, passes)
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    kept = [np.nonzero(rng.random(len(costs)) < 0.6)[0] for costs in passing.costs]
    kept = [states if len(states) else np.array([0]) for states in kept]
    part = restricted(passing, kept)
    assert [len(costs) for costs in part.graph.costs] == [len(kept[place]) for place in part.variables]
    assert all(len(costs) > 1 for costs in part.graph.costs)
    for _ in range(20):
        own = [int(rng.integers(len(costs))) for costs in part.graph.costs]
        found = part.expanded(own)
        assert all(x in states for x, states in zip(found, kept, strict=True))
        assert [kept[place].tolist().index(found[place]) for place in part.variables] == own
        full = np.zeros(len(found), dtype=int)
        full[passing.variables] = found
        assert part.constant + part.graph.energy(own) == case.costs[tuple(full)]
