"""The runs of equal blocks, and the graph in which few blocks stand for all of a run."""

from __future__ import annotations

import numpy as np
import pytest
from factor_graphs import Model, assignments, chain_of, models
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.solver.elimination import Eliminated
from autopar.search.solver.fold import Folded, Run, rings_of, runs
from autopar.search.solver.tied import Reduced

chains = st.builds(chain_of, st.integers(0, 2**32 - 1), st.integers(7, 10), st.integers(2, 3))


def run_of(blocks: list[list[int]], first: int, last: int) -> Run:
    """The run from one block to another, with the blocks beside it."""
    beside = [blocks[k] if 0 <= k < len(blocks) else [] for k in (first - 1, last + 1)]
    return Run(blocks[first : last + 1], *beside)


@settings(deadline=None, max_examples=20)
@given(chains)
def test_the_equal_blocks_are_a_run(chain) -> None:
    found = runs(chain.graph, range(len(chain.graph.costs)), chain.labels)
    assert found == [run_of(chain.blocks, 1, len(chain.blocks) - 2)]


def test_blocks_without_labels_are_no_run() -> None:
    chain = chain_of(0, 9, 2)
    assert runs(chain.graph, range(len(chain.labels)), [""] * len(chain.labels)) == []
    assert runs(chain.graph, range(len(chain.labels)), [label.replace(".", "") for label in chain.labels]) == []


def test_another_cost_or_edge_ends_a_run() -> None:
    chain = chain_of(0, 16, 2)
    changed = chain.blocks[7]
    chain.graph.costs[changed[0]] = chain.graph.intern(chain.graph.costs[changed[0]] + 1)
    every = range(len(chain.labels))
    assert runs(chain.graph, every, chain.labels) == [run_of(chain.blocks, 8, 14), run_of(chain.blocks, 1, 6)]
    chain = chain_of(0, 16, 2)
    chain.graph.add_edge(chain.blocks[7][0], chain.blocks[8][1], np.arange(3), np.arange(3), np.eye(3))
    assert runs(chain.graph, every, chain.labels) == [run_of(chain.blocks, 1, 6), run_of(chain.blocks, 9, 14)]


def test_two_runs_come_with_the_longest_first() -> None:
    chain = chain_of(0, 17, 2)
    labels = [
        label.replace("layers", "encoder") if v < chain.blocks[7][0] else label for v, label in enumerate(chain.labels)
    ]
    found = runs(chain.graph, range(len(labels)), labels)
    assert [run.blocks for run in found] == [chain.blocks[8:16], chain.blocks[1:6]]
    assert len(rings_of(chain.graph, labels)) == 1  # the run of five blocks is too short for two rings of three


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


def test_a_ring_of_two_blocks_has_one_edge_for_each_pair() -> None:
    """A variable with an edge to its own copy in the next block needs three."""
    chain = chain_of(0, 16, 2)
    assert [(ring.period, ring.times, len(ring.blocks)) for ring in rings_of(chain.graph, chain.labels)] == [(3, 4, 12)]
    for k in range(15):
        for p, q in [(0, 0), (1, 1), (1, 0)]:
            del chain.graph.edges[chain.blocks[k][p], chain.blocks[k + 1][q]]
    (ring,) = rings_of(chain.graph, chain.labels)
    assert (ring.period, ring.times, ring.before, ring.after) == (2, 7, chain.blocks[0], chain.blocks[15])
    assert [crossing[:2] for crossing in ring.crossings] == [(0, 1)]


def test_blocks_that_are_left_over_follow_the_ring() -> None:
    chain = chain_of(0, 12, 2)
    (ring,) = rings_of(chain.graph, chain.labels)
    assert ring.blocks == chain.blocks[1:10]
    assert ring.after == chain.blocks[10]


def test_few_blocks_are_no_ring() -> None:
    assert [len(rings_of(c.graph, c.labels)) for c in (chain_of(0, 7, 2), chain_of(0, 8, 2))] == [0, 1]


@pytest.mark.simulated
@settings(deadline=None, max_examples=40)
@given(models(), st.integers(0, 99))
def test_the_weighted_graph_costs_what_all_blocks_cost(model: Model, seed: int) -> None:
    """For all assignments that repeat, also when the others are eliminated."""
    folded = Folded(model.graph, rings_of(model.graph, model.labels))
    assert sum(folded.times) == len(model.labels)
    assert sum(folded.edge_times.values()) == len(model.graph.edges)
    reduced = Reduced(folded)
    for states in assignments(folded.graph, seed, 5):
        full = reduced.eliminated.completed(states)
        left = reduced.weighted.energy(full) - sum(
            reduced.weighted.costs[v][full[v]] for v in range(len(full)) if v not in reduced.left
        )
        assert left + reduced.constant == model.graph.energy(folded.extended(full))


def test_blocks_of_a_ring_are_eliminated_alike() -> None:
    chain = chain_of(3, 9, 3)
    for block in chain.blocks:  # a leaf and a path, which go
        leaf = chain.graph.add_variable("leaf", [1, 2, 3])
        chain.graph.add_edge(block[0], leaf, np.arange(3), np.arange(3), np.arange(9.0).reshape(3, 3))
        chain.labels.append(chain.labels[block[0]])
    folded = Folded(chain.graph, rings_of(chain.graph, chain.labels))
    reduced = Reduced(folded)
    (ring,) = folded.rings
    left = [[v in reduced.left for v in block] for block in folded.blocks(ring)]
    assert left == [[True, True, True, False]] * 3
    assert len(Eliminated(folded.graph, kept=range(len(folded.variables))).left) == len(folded.variables)
