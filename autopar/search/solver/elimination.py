"""Eliminate variables exactly: minimise over one, and add what remains to the costs of its neighbours.

A variable without neighbours, with one or with two leaves no, one or a pair cost. Most ops of a model are of this kind.
Equal eliminations, as in equal layers, are computed once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from autopar.search.solver.factor_graph import Array, Edge, FactorGraph

MOST = 2**22  # entries of an intermediate table


class _Step(NamedTuple):
    """A variable that was eliminated, with its costs and its edges at that time."""

    variable: int
    costs: Array
    edges: tuple[tuple[int, Edge], ...]  # the neighbour, and the edge with this variable at its left


class Eliminated:
    """A factor graph whose variables of low degree are eliminated.

    Attributes:
        graph: the rest; eliminated variables have no edges.
        left: the variables that are left.
        constant: the nanoseconds of what was eliminated entirely.

    Args:
        kept: variables that stay.
    """

    def __init__(self, graph: FactorGraph, memo: dict[object, Array] | None = None, kept: Collection[int] = ()) -> None:
        self.graph = FactorGraph(graph.intern, list(graph.costs), list(graph.names), dict(graph.edges), graph._merged)
        self.constant = 0.0
        self.steps: list[_Step] = []
        self._memo = {} if memo is None else memo
        self._neighbours: defaultdict[int, set[int]] = defaultdict(set)
        for i, j in graph.edges:
            self._neighbours[i].add(j)
            self._neighbours[j].add(i)
        self._run(set(kept))

    def _run(self, kept: set[int]) -> None:
        alive = set(range(len(self.graph.costs)))
        queue = sorted(alive)
        while queue:
            again: set[int] = set()
            for variable in queue:
                if variable in alive and variable not in kept and self._removable(variable):
                    again |= self._neighbours[variable]
                    self._eliminate(variable)
                    alive.remove(variable)
            queue = sorted(again & alive)
        self.left = sorted(alive)

    def _removable(self, variable: int) -> bool:
        others = sorted(self._neighbours[variable])
        if len(others) < 2:
            return True
        if len(others) > 2:
            return False
        (_, a), (_, b) = self._edges(variable)
        states = len(self.graph.costs[variable])
        return a.table.shape[1] * b.table.shape[1] * states <= MOST and a.table.shape[1] * b.table.shape[1] <= 2**17

    def _edges(self, variable: int) -> tuple[tuple[int, Edge], ...]:
        found = []
        for other in sorted(self._neighbours[variable]):
            if variable < other:
                found.append((other, self.graph.edges[variable, other]))
            else:
                edge = self.graph.edges[other, variable]
                found.append((other, Edge(edge.right, edge.left, self.graph.intern(edge.table.T))))
        return tuple(found)

    def _eliminate(self, variable: int) -> None:
        graph, edges, costs = self.graph, self._edges(variable), self.graph.costs[variable]
        self.steps.append(_Step(variable, costs, edges))
        for other, _ in edges:
            graph.edges.pop((min(variable, other), max(variable, other)))
            self._neighbours[other].discard(variable)
        if not edges:
            self.constant += float(costs.min())
        elif len(edges) == 1:
            ((other, edge),) = edges
            key = (id(costs), *map(id, edge), id(graph.costs[other]))
            if key not in self._memo:
                message = (least_by(costs, edge.left, len(edge.table))[:, None] + edge.table).min(axis=0)
                self._memo[key] = graph.intern(graph.costs[other] + message[edge.right])
            graph.costs[other] = self._memo[key]
        else:
            (j, a), (k, b) = edges
            key = (id(costs), *map(id, a), *map(id, b))
            if key not in self._memo:
                self._memo[key] = graph.intern(_joined(costs, a, b))
            graph.add_edge(j, k, a.right, b.right, self._memo[key])
            self._neighbours[j].add(k)
            self._neighbours[k].add(j)

    def completed(self, states: Array) -> Array:
        """Return an assignment of all variables from one of those that are left: the best states of the others."""
        states = states.copy()
        for variable, costs, edges in reversed(self.steps):
            total = costs.copy()
            for other, edge in edges:
                total += edge.table[edge.left, edge.right[states[other]]]
            states[variable] = int(total.argmin())
        return states


def least_by(costs: Array, groups: Array, count: int) -> Array:
    """Return the least cost of each group; infinite for empty ones."""
    least = np.full(count, np.inf)
    np.minimum.at(least, groups, costs)
    return least


def _joined(costs: Array, a: Edge, b: Edge) -> Array:
    """Return ``min over x of a[x, y] + costs[x] + b[x, z]``: [y, z]."""
    pairs, number = np.unique(np.stack([a.left, b.left], axis=1), axis=0, return_inverse=True)
    least = least_by(costs, number.reshape(-1), len(pairs))
    left = a.table[pairs[:, 0]] + least[:, None]  # [x, y]
    right = b.table[pairs[:, 1]]  # [x, z]
    result = np.full((left.shape[1], right.shape[1]), np.inf)
    for x in range(len(pairs)):
        np.minimum(result, left[x][:, None] + right[x][None, :], out=result)
    return result
