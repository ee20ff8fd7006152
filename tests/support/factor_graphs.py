"""Small random factor graphs, and the costs of all their assignments, computed without the solver."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from autopar.search.solver.factor_graph import Array, Edge, FactorGraph


class Case(NamedTuple):
    """A factor graph, and the cost of each assignment of it: one axis a variable."""

    graph: FactorGraph
    costs: Array


def spread(table: Array, axes: Sequence[int], count: int) -> Array:
    """Place the axes of a table among ``count`` axes, in a shape that broadcasts."""
    shape = [1] * count
    for axis, size in zip(axes, table.shape, strict=True):
        shape[axis] = size
    return (table if list(axes) == sorted(axes) else table.T).reshape(shape)


def dense(edge: Edge) -> Array:
    """Return the cost of each pair of states."""
    return np.array([[edge.table[x, y] for y in edge.right] for x in edge.left])


def all_costs(graph: FactorGraph) -> Array:
    """Return the cost of each assignment: one axis a variable."""
    count = len(graph.costs)
    total = np.zeros([len(costs) for costs in graph.costs])
    for v, costs in enumerate(graph.costs):
        total = total + spread(costs, [v], count)
    for ends, edge in graph.edges.items():
        total = total + spread(dense(edge), ends, count)
    return total


def numbered(rng: np.random.Generator, states: int) -> Array:
    """Number states, so that some share a number, and no number is left out."""
    return np.unique(rng.integers(0, states, states), return_inverse=True)[1].reshape(-1)


def case_of(seed: int, states: Sequence[int], pairs: Sequence[tuple[int, int]], largest: int) -> Case:
    """Make a graph with whole costs up to ``largest``; a pair that comes twice gets two edges."""
    rng = np.random.default_rng(seed)
    graph, total = FactorGraph(), np.zeros(states)
    for v, count in enumerate(states):
        costs = rng.integers(0, largest + 1, count).astype(float)
        assert graph.add_variable(f"v{v}", costs) == v
        total = total + spread(costs, [v], len(states))
    for i, j in pairs:
        left, right = numbered(rng, states[i]), numbered(rng, states[j])
        table = rng.integers(0, largest + 1, (left.max() + 1, right.max() + 1)).astype(float)
        graph.add_edge(i, j, left, right, table)
        total = total + spread(dense(Edge(left, right, table)), [i, j], len(states))
    return Case(graph, total)


@st.composite
def cases(draw: st.DrawFn, most: int = 7, tree: bool = False) -> Case:
    """Draw a graph of a few variables: isolated ones, parts without a connection, edges twice, and equal costs too."""
    states = draw(st.lists(st.integers(1, 4), min_size=1, max_size=most))
    count = len(states)
    if tree:
        pairs = [(draw(st.integers(0, v - 1)), v) for v in range(1, count)]
    else:
        possible = [(i, j) for i, j in itertools.permutations(range(count), 2)]
        pairs = draw(st.lists(st.sampled_from(possible), max_size=2 * count)) if possible else []
    return case_of(draw(st.integers(0, 2**32 - 1)), states, pairs, draw(st.sampled_from([1, 5, 1000])))


@st.composite
def dense_cases(draw: st.DrawFn, most: int = 7) -> Case:
    """Draw a graph in which every pair has an edge: no variable of four or more can be eliminated."""
    states = draw(st.lists(st.integers(2, 4), min_size=4, max_size=most))
    pairs = list(itertools.combinations(range(len(states)), 2))
    return case_of(draw(st.integers(0, 2**32 - 1)), states, pairs, draw(st.sampled_from([1, 5, 1000])))


def assignments(graph: FactorGraph, seed: int = 0, count: int = 40) -> Array:
    """Draw random assignments: [count, variables]."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(0, len(costs), count) for costs in graph.costs], axis=1)


def least_cost(graph: FactorGraph) -> float:
    """Return the cost of the best assignment: minimise over one variable after the other, the last one first."""
    factors = [((v,), costs) for v, costs in enumerate(graph.costs)]
    factors += [(ends, dense(edge)) for ends, edge in graph.edges.items()]
    for v in reversed(range(len(graph.costs))):
        mine = [factor for factor in factors if v in factor[0]]
        scope = sorted({u for ends, _ in mine for u in ends})
        total = sum(spread(table, [scope.index(u) for u in ends], len(scope)) for ends, table in mine)
        factors = [factor for factor in factors if v not in factor[0]]
        factors.append((tuple(u for u in scope if u != v), total.min(axis=scope.index(v))))
    return float(sum(table for _, table in factors))


class Chain(NamedTuple):
    """A variable outside, and blocks that follow each other; all but the first and the last one are equal."""

    graph: FactorGraph
    labels: list[str]
    blocks: list[list[int]]


def chain_of(seed: int, count: int, width: int, states: int = 3) -> Chain:
    """Make a chain of ``count`` blocks of ``width`` variables. Edges are inside, to the next block, and to outside."""
    rng = np.random.default_rng(seed)
    graph, labels = FactorGraph(), [""]
    graph.add_variable("outside", rng.integers(0, 100, 2))

    def table() -> tuple[Array, Array, Array]:
        left, right = numbered(rng, states), numbered(rng, states)
        return left, right, rng.integers(0, 100, (left.max() + 1, right.max() + 1)).astype(float)

    inside = {pair: table() for pair in itertools.combinations(range(width), 2)}
    onwards = {pair: table() for pair in itertools.product(range(width), repeat=2)}
    outside = [(np.arange(2), np.arange(states), rng.integers(0, 100, (2, states)).astype(float)) for _ in range(width)]
    costs = [rng.integers(0, 100, states) for _ in range(width)]
    blocks: list[list[int]] = []
    for k in range(count):
        own = costs if 0 < k < count - 1 else [each + 1 + k for each in costs]
        blocks.append([graph.add_variable(f"layers.{k}.{p}", own[p]) for p in range(width)])
        labels += [f"layers.{k}"] * width
        for (p, q), edge in inside.items():
            graph.add_edge(blocks[k][p], blocks[k][q], *edge)
        for p in range(width):
            graph.add_edge(0, blocks[k][p], *outside[p])
        if k:
            for (p, q), edge in onwards.items():
                graph.add_edge(blocks[k - 1][p], blocks[k][q], *edge)
    return Chain(graph, labels, blocks)


class Model(NamedTuple):
    """Outer variables, and stacks of blocks that follow each other, with a label for each variable."""

    graph: FactorGraph
    labels: list[str]


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Draw a graph like that of a model: blocks with few edges to each other and to outer variables.

    The first and the last block may differ from the others, one in the middle too, and there may be two stacks. Some
    variables have one state, some edges come twice, and some costs are forbidding.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    largest = draw(st.sampled_from([1, 5, 1000]))
    graph, labels = FactorGraph(), list[str]()

    def table(rows: int, columns: int) -> tuple[Array, Array, Array]:
        left, right = numbered(rng, rows), numbered(rng, columns)
        costs = rng.integers(0, largest + 1, (left.max() + 1, right.max() + 1)).astype(float)
        return left, right, np.where(rng.random(costs.shape) < 0.05, 2.0**20, costs)

    def add(name: str, label: str, states: int) -> int:
        labels.append(label)
        return graph.add_variable(name, rng.integers(0, largest + 1, states))

    outer = [add(f"outer{k}", "", int(rng.integers(1, 4))) for k in range(draw(st.integers(0, 3)))]
    for stack in range(draw(st.integers(1, 2))):
        _add_stack(draw, rng, graph, labels, f"stack{stack}", outer, table)
        head = add(f"head{stack}", "", 2)
        for v in (0, head - 1):
            if v != head:
                graph.add_edge(v, head, *table(len(graph.costs[v]), 2))
    return Model(graph, labels)


def _add_stack(
    draw: st.DrawFn,
    rng: np.random.Generator,
    graph: FactorGraph,
    labels: list[str],
    name: str,
    outer: Sequence[int],
    table: Callable[[int, int], tuple[Array, Array, Array]],
) -> None:
    count, width = draw(st.integers(4, 14)), draw(st.integers(1, 3))
    states = rng.integers(1, 4, width)
    costs = [rng.integers(0, 9, size) for size in states]
    sized = lambda pairs, first, second: [(p, q, table(first[p], second[q])) for p, q in pairs]  # noqa: E731
    drawn = lambda pairs: [pair for pair in pairs if rng.random() < 0.7]  # noqa: E731
    inside = sized(drawn(itertools.combinations(range(width), 2)), states, states)
    onwards = sized(drawn(itertools.product(range(width), repeat=2)), states, states)
    outside = sized(
        drawn(itertools.product(range(len(outer)), range(width))), [len(graph.costs[v]) for v in outer], states
    )
    odd = draw(st.sampled_from([(), (0,), (0, count - 1), (count - 2,), (2, count - 1)]))
    before: list[int] = []
    rng.shuffle(outside)
    for k in range(count):
        block = []
        for p in range(width):
            labels.append(f"{name}.{k}")
            block.append(graph.add_variable(f"{name}.{k}.{p}", costs[p] + (k in odd)))
        for p, q, edge in inside:
            graph.add_edge(block[p], block[q], *edge)
        for p, q, edge in outside:
            graph.add_edge(outer[p], block[q], *edge)
        for p, q, edge in onwards if before else []:
            graph.add_edge(before[p], block[q], *edge)
        before = block
