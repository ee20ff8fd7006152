"""Fold long chains of equal blocks to short ones, whose blocks stand for many.

A run of equal blocks becomes a ring of two blocks, or of three where two would have two edges for one pair of
variables. All blocks of the run take the states and the messages of these in turn. So a variable of a ring counts as
often as it has blocks, and so does each edge. The least cost of the weighted graph is that of the best assignment that
repeats in each run.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autopar.search.solver.factor_graph import Array, Edge, FactorGraph

LEAST = 2  # how often a ring stands in its run


class Run(NamedTuple):
    """Blocks that follow each other and are equal, also in their edges to each other and to what is outside.

    The blocks beside the run have other costs or edges, but those to the run are equal too.

    Attributes:
        blocks: the variables of each block, in order.
        before, after: the blocks beside the run.
    """

    blocks: list[list[int]]
    before: list[int]
    after: list[int]


def runs(graph: FactorGraph, variables: Sequence[int], labels: Sequence[str]) -> list[Run]:
    """Return the runs of equal blocks, the longest first.

    Args:
        variables: those of the graph that count.
        labels: variable → the path of its block, as ``layers.3``, or "" outside of blocks.
    """
    chains: dict[str, dict[int, list[int]]] = {}
    for v in variables:
        head, _, number = labels[v].rpartition(".")
        if number.isdecimal():
            chains.setdefault(head, {}).setdefault(int(number), []).append(v)
    found = []
    for members in chains.values():
        blocks = _without_far(graph, [members[number] for number in sorted(members)])
        place = {v: (k, p) for k, block in enumerate(blocks) for p, v in enumerate(block)}
        edges: dict[int, dict[object, tuple[int, ...]]] = {k: {} for k in range(len(blocks))}
        for (i, j), edge in graph.edges.items():
            ids = tuple(map(id, edge))
            (k, p), (m, q) = place.get(i, (-1, i)), place.get(j, (-1, j))
            if k >= 0:
                edges[k][p, m - k if m >= 0 else "out", q] = ids
            if m >= 0 and m != k:
                edges[m]["in", k - m if k >= 0 else "out", p, q] = ids
        signs = [
            (tuple(id(graph.costs[v]) for v in block), frozenset(edges[k].items())) for k, block in enumerate(blocks)
        ]
        begin = 0
        for k in range(1, len(blocks) + 1):
            if k == len(blocks) or signs[k] != signs[begin]:
                beside = [blocks[b] if 0 <= b < len(blocks) else [] for b in (begin - 1, k)]
                found.append(Run(blocks[begin:k], *beside))
                begin = k
    return sorted((run for run in found if len(run.blocks) > 1), key=lambda run: -len(run.blocks))


def _without_far(graph: FactorGraph, blocks: list[list[int]]) -> list[list[int]]:
    """Leave out the variables that are beside a block which is neither their own nor the next or the previous one."""
    of = {v: k for k, block in enumerate(blocks) for v in block}
    far = [(i, j) for i, j in graph.edges if i in of and j in of and abs(of[i] - of[j]) > 1]
    # the readers are beside the value of another block too: only the ends with several such edges are left out
    count: dict[int, int] = {}
    for v in (v for ends in far for v in ends):
        count[v] = count.get(v, 0) + 1
    dropped: set[int] = set()
    for i, j in far:
        if not dropped & {i, j}:
            dropped.add(i if count[i] >= count[j] else j)
    return [[v for v in block if v not in dropped] for block in blocks]


class Crossing(NamedTuple):
    """An edge from each block of a run to the next one.

    Attributes:
        lower, upper: the places of its ends in the two blocks.
        edge: with the lower end at its left.
    """

    lower: int
    upper: int
    edge: Edge


class Ring:
    """Few blocks that stand for those of a run in turn.

    Attributes:
        blocks: those of the run in the long graph; their number is a multiple of the period.
        before, after: the blocks beside them.
        period: how many blocks the ring has.
        times: how often each of them stands in the run.
        crossings: the edges from each block to the next one.
    """

    def __init__(self, graph: FactorGraph, run: Run) -> None:
        place = {v: (k, p) for k, block in enumerate(run.blocks) for p, v in enumerate(block)}
        found: dict[tuple[int, int], Edge] = {}
        for (i, j), edge in graph.edges.items():
            (k, p), (m, q) = place.get(i, (-1, 0)), place.get(j, (-1, 0))
            if {k, m} == {0, 1}:
                found[(p, q) if k == 0 else (q, p)] = edge if k == 0 else flipped(graph, edge)
        self.crossings = [Crossing(p, q, edge) for (p, q), edge in sorted(found.items(), key=lambda each: each[0])]
        self.period = 3 if any((q, p) in found for p, q in found) else 2
        self.times = len(run.blocks) // self.period
        count = self.times * self.period
        self.blocks, self.before = run.blocks[:count], run.before
        self.after = [*run.blocks[count:], run.after][0]


class Folded:
    """A graph in which rings stand for the longest runs.

    Attributes:
        graph: the short one; each variable and edge has its costs once.
        variables: variable of the short graph → variable of the long one; in a ring, the first that it stands for.
        times: variable of the short graph → for how many it stands.
        edge_times: edge of the short graph → for how many it stands.
    """

    def __init__(self, graph: FactorGraph, rings: Sequence[Ring]) -> None:
        self.long, self.rings = graph, list(rings)
        stands = {v: v for v in range(len(graph.costs))}
        for ring in rings:
            for k, block in enumerate(ring.blocks):
                stands.update(zip(block, ring.blocks[k % ring.period], strict=True))
        self.variables = [v for v in stands if stands[v] == v]
        number = {v: k for k, v in enumerate(self.variables)}
        self.number = {v: number[first] for v, first in stands.items()}
        self.times = np.bincount(list(self.number.values()), minlength=len(self.variables)).tolist()
        self.graph, self.edge_times = FactorGraph(graph.intern), dict[tuple[int, int], int]()
        for v in self.variables:
            self.graph.add_variable(graph.names[v], graph.costs[v])
        for (i, j), edge in graph.edges.items():
            a, b = self.number[i], self.number[j]
            ends = (min(a, b), max(a, b))
            self.edge_times[ends] = self.edge_times.get(ends, 0) + 1
            if ends not in self.graph.edges:
                self.graph.edges[ends] = edge if a < b else flipped(graph, edge)

    def changed(self, graph: FactorGraph, costs: Mapping[int, Array]) -> Folded:
        """Return the same fold with other costs of some variables.

        Args:
            graph: the long graph with its costs.
            costs: variable of the short graph → its costs.
        """
        other = copy.copy(self)
        other.long, short = graph, self.graph
        own = [costs.get(v, known) for v, known in enumerate(short.costs)]
        other.graph = FactorGraph(short.intern, own, short.names, short.edges)
        return other

    def blocks(self, ring: Ring) -> list[list[int]]:
        """Return the variables of the blocks of a ring in the short graph."""
        return [[self.number[v] for v in block] for block in ring.blocks[: ring.period]]

    def extended(self, states: Array) -> Array:
        """Return the states of the long graph from those of the short one."""
        return np.array([states[self.number[v]] for v in range(len(self.long.costs))], dtype=np.int64)


def flipped(graph: FactorGraph, edge: Edge) -> Edge:
    """Return an edge with its ends exchanged."""
    return Edge(edge.right, edge.left, graph.intern(edge.table.T))


def rings_of(graph: FactorGraph, labels: Sequence[str]) -> list[Ring]:
    """Return the rings of the runs that are long enough; no two of them are beside each other."""
    found: list[Ring] = []
    inside: dict[int, int] = {}
    for run in runs(graph, range(len(graph.costs)), labels):
        ring = Ring(graph, run)
        if ring.times < LEAST:
            continue
        mine = {v for block in ring.blocks for v in block}
        if not any((i in mine and j in inside) or (j in mine and i in inside) for i, j in graph.edges):
            inside.update(dict.fromkeys(mine, len(found)))
            found.append(ring)
    return found
