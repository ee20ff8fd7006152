"""Eliminate variables of low degree from a folded graph, in all blocks of a ring alike."""

from __future__ import annotations

import operator
from collections.abc import Container
from functools import cached_property

from autopar.search.solver.elimination import Eliminated
from autopar.search.solver.factor_graph import Array, FactorGraph
from autopar.search.solver.fold import Folded


class Reduced:
    """A folded graph whose variables of low degree are eliminated, in all blocks of a ring alike.

    Attributes:
        graph: the rest; each variable and edge has its costs once.
        left: the variables that are left.
        eliminated: the elimination.
        constant: the nanoseconds of what was eliminated entirely.
    """

    def __init__(self, folded: Folded, memo: dict[object, Array] | None = None) -> None:
        times, stands = folded.times, folded.edge_times
        kept = {v for ends, count in stands.items() if {count, *(times[v] for v in ends)} != {count} for v in ends}
        for ring in folded.rings:
            for block in folded.blocks(ring):
                kept |= {block[p] for crossing in ring.crossings for p in (crossing.lower, crossing.upper)}
        self.memo: dict[object, Array] = {} if memo is None else memo  # of equal eliminations
        self.folded, self.eliminated = folded, Eliminated(folded.graph, self.memo, kept)
        self.graph, self.left = self.eliminated.graph, self.eliminated.left
        self.constant = sum(
            times[step.variable] * float(step.costs.min()) for step in self.eliminated.steps if not step.edges
        )

    @cached_property
    def weighted(self) -> FactorGraph:
        """The graph whose variables and edges cost as often as they stand for others."""
        found = FactorGraph(self.graph.intern)
        for v, costs in enumerate(self.graph.costs):
            found.add_variable(self.graph.names[v], costs * self.folded.times[v])
        for ends, edge in self.graph.edges.items():
            found.edges[ends] = edge._replace(table=self.graph.intern(edge.table * self.edge_times(ends)))
        return found

    def alike(self, other: Reduced) -> bool:
        """Return whether another graph has the same variables and edges left, and as many states of each."""
        return (
            self.left == other.left
            and self.graph.edges.keys() == other.graph.edges.keys()
            and all(e.table.shape == other.graph.edges[ends].table.shape for ends, e in self.graph.edges.items())
        )

    def same(self, other: Reduced, variables: Container[int]) -> bool:
        """Return whether some variables have the same costs and edges in a graph that is alike."""
        graph, own = other.graph, self.graph
        return all(own.costs[v] is graph.costs[v] for v in self.left if v in variables) and all(
            all(map(operator.is_, edge, graph.edges[i, j]))
            for (i, j), edge in own.edges.items()
            if i in variables or j in variables
        )

    def edge_times(self, ends: tuple[int, int]) -> int:
        """Return for how many edges an edge stands."""
        return self.folded.edge_times.get(ends) or max(self.folded.times[v] for v in ends)
