"""The run of equal blocks of a chain, and the messages of a short chain in the long one."""

from __future__ import annotations

import numpy as np
import pytest
from factor_graphs import Chain, assignments, chain_of, least_cost
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.factor_graph import FactorGraph
from autopar.search.fold import Folded, Run, runs
from autopar.search.message_passing import MessagePassing

chains = st.builds(chain_of, st.integers(0, 2**32 - 1), st.integers(7, 10), st.integers(2, 3))


def folded(chain: Chain) -> Folded:
    left = list(range(len(chain.graph.costs)))
    (run,) = runs(chain.graph, left, chain.labels)
    return Folded(chain.graph, left, run)


def short_passing(short: Folded, passes: int) -> MessagePassing:
    passing = MessagePassing(short.graph, range(len(short.variables)), short.variables)
    passing.run(passes)
    return passing


@settings(deadline=None, max_examples=20)
@given(chains)
def test_the_equal_blocks_are_a_run(chain: Chain) -> None:
    assert runs(chain.graph, range(len(chain.graph.costs)), chain.labels) == [Run(chain.blocks[1:-1])]


def test_few_blocks_are_no_run() -> None:
    assert [
        len(runs(c.graph, range(len(c.graph.costs)), c.labels)) for c in (chain_of(0, 6, 2), chain_of(0, 7, 2))
    ] == [0, 1]


def test_blocks_without_labels_are_no_run() -> None:
    chain = chain_of(0, 9, 2)
    assert runs(chain.graph, range(len(chain.labels)), [""] * len(chain.labels)) == []
    assert runs(chain.graph, range(len(chain.labels)), [label.replace(".", "") for label in chain.labels]) == []


def test_another_cost_or_edge_ends_a_run() -> None:
    chain = chain_of(0, 16, 2)
    changed = chain.blocks[7]
    chain.graph.costs[changed[0]] = chain.graph.intern(chain.graph.costs[changed[0]] + 1)
    every = range(len(chain.labels))
    assert runs(chain.graph, every, chain.labels) == [Run(chain.blocks[8:15]), Run(chain.blocks[1:7])]
    chain = chain_of(0, 16, 2)
    chain.graph.add_edge(chain.blocks[7][0], chain.blocks[8][1], np.arange(3), np.arange(3), np.eye(3))
    assert runs(chain.graph, every, chain.labels) == [Run(chain.blocks[1:7]), Run(chain.blocks[9:15])]


def test_two_runs_come_with_the_longest_first() -> None:
    chain = chain_of(0, 17, 2)
    labels = [
        label.replace("layers", "encoder") if v < chain.blocks[7][0] else label for v, label in enumerate(chain.labels)
    ]
    found = runs(chain.graph, range(len(labels)), labels)
    assert found == [Run(chain.blocks[8:16]), Run(chain.blocks[1:6])]


@pytest.mark.parametrize("reader", [0, 1])
def test_a_value_that_many_blocks_read_is_outside_of_the_run(reader: int) -> None:
    """It is a variable of one block, and has edges to all others."""
    chain = chain_of(0, 10, 2)
    value = chain.graph.add_variable("layers.0.value", [1, 2])
    chain.labels.append("layers.0")
    for block in chain.blocks[1:]:
        chain.graph.add_edge(value, block[reader], np.arange(2), np.arange(3), np.arange(6.0).reshape(2, 3))
    (run,) = runs(chain.graph, range(len(chain.labels)), chain.labels)
    assert run.blocks == chain.blocks[1:-1]


@settings(deadline=None, max_examples=20)
@given(chains)
def test_a_short_chain_has_four_blocks_of_the_run(chain: Chain) -> None:
    short = folded(chain)
    kept = [0, 1, 2, 3, len(chain.blocks) - 2, len(chain.blocks) - 1]
    assert short.variables == [0, *(v for k in kept for v in chain.blocks[k])]
    width = len(chain.blocks[0])
    assert len(short.graph.edges) == 6 * (width * (width - 1) // 2 + width) + 5 * width**2
    number = {v: k for k, v in enumerate(short.variables)}
    for (i, j), edge in chain.graph.edges.items():
        if i in number and j in number:
            assert all(a is b for a, b in zip(short.graph.edges[number[i], number[j]], edge, strict=True))
    # the last block follows the third as the second follows the first
    for p in chain.blocks[2]:
        for q in chain.blocks[3]:
            if (p, q) in chain.graph.edges:
                beside = chain.blocks[-2][chain.blocks[3].index(q)]
                third = chain.blocks[3][chain.blocks[2].index(p)]
                assert short.graph.edges[number[third], number[beside]] == chain.graph.edges[p, q]


@settings(deadline=None, max_examples=20)
@given(chains, st.integers(1, 12))
def test_messages_of_the_short_chain_keep_all_costs_of_the_long_one(chain: Chain, passes: int) -> None:
    short = folded(chain)
    long = short.unfolded(short_passing(short, passes))
    assert long.names == chain.graph.names
    for states in assignments(chain.graph, count=10):
        assert long.energy(states) == chain.graph.energy(states)


def sum_of_least(graph: FactorGraph) -> float:
    return float(sum(costs.min() for costs in graph.costs) + sum(edge.table.min() for edge in graph.edges.values()))


@settings(deadline=None, max_examples=15)
@given(chains, st.integers(1, 12))
def test_the_bound_of_the_long_chain_is_below_its_minimum(chain: Chain, passes: int) -> None:
    short = folded(chain)
    long = short.unfolded(short_passing(short, passes))
    passing = MessagePassing(long, range(len(long.costs)), range(len(long.costs)))
    passing.run(1)
    least = least_cost(chain.graph)
    assert sum_of_least(long) <= least
    assert sum_of_least(long) - 1e-3 < passing.bound <= least


def test_the_messages_of_the_short_chain_serve_the_long_one() -> None:
    """This is what folding is for: they prove nine tenths of what is to prove, without a pass on the long chain."""
    for seed in range(4):
        chain = chain_of(seed, 40, 2)
        short = folded(chain)
        least, long = least_cost(chain.graph), short.unfolded(short_passing(short, 10))
        assert least - sum_of_least(long) < 0.1 * (least - sum_of_least(chain.graph))


@settings(deadline=None, max_examples=15)
@given(chains, st.data())
def test_the_blocks_of_a_long_chain_get_the_states_of_a_short_one(chain: Chain, data: st.DataObject) -> None:
    short = folded(chain)
    states = assignments(short.graph, data.draw(st.integers(0, 99)), 1)[0].tolist()
    full = short.extended(dict(enumerate(states)))
    assert sorted(full) == short.left
    assert [full[v] for v in short.variables if v not in chain.blocks[3]] == [
        x for v, x in zip(short.variables, states, strict=True) if v not in chain.blocks[3]
    ]
    second = [full[v] for v in chain.blocks[2]]
    assert all([full[v] for v in block] == second for block in chain.blocks[3:-2])


def test_a_subset_of_the_variables_is_folded() -> None:
    """As after elimination: variables that are not left have no edges."""
    chain = chain_of(0, 9, 2)
    isolated = chain.graph.add_variable("isolated", [1, 2])
    left = list(range(isolated))
    (run,) = runs(chain.graph, left, [*chain.labels, "layers.3"])
    short = Folded(chain.graph, left, run)
    long = short.unfolded(short_passing(short, 3))
    assert len(long.costs) == isolated
    states = np.ones(isolated + 1, dtype=int)
    assert long.energy(states[:-1]) == chain.graph.energy(states) - 2
