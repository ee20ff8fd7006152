"""Solve a graph with long runs again, where few variables have other costs than in the graph that was solved.

The messages of the blocks of a run hold for those with the same costs. A block with other costs is a part of its own,
between the same messages, and all other parts keep their tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.search.solver.factor_graph import Array, FactorGraph
from autopar.search.solver.periodic import Best, Periodic
from autopar.search.solver.reduced import Reduced

MOST = 4  # kinds of blocks that differ from the others of a run

_Costs = frozenset[tuple[int, int]]  # variables of the folded graph, and the places of their costs


@dataclass(frozen=True, eq=False)
class Settled:
    """A graph with long runs that is solved.

    Attributes:
        graph: the long graph.
        reduced: its folded graph.
        periodic: its parts.
        states: its answer.
    """

    graph: FactorGraph
    reduced: Reduced
    periodic: Periodic
    states: Array

    def again(self, graph: FactorGraph, deadline: float) -> tuple[Best, float] | None:
        """Return the best assignment of the same graph with other costs, and the bound.

        ``None`` if the parts of this graph do not prove it.

        Args:
            deadline: of ``time.monotonic``.
        """
        if graph.edges is not self.graph.edges or len(graph.costs) != len(self.graph.costs):
            return None
        places = {v: k for k, v in enumerate(self.changed(graph))}
        costs = [graph.costs[v] for v in places]
        short, blocks = self._sorted(graph, places)
        if len(set(blocks.values())) > MOST:
            return None
        reduced = self._reduced(graph, {v: costs[place] for v, place in short.items()})
        others: dict[tuple[tuple[int, int], ...], Reduced] = {}
        different: dict[tuple[int, int], Reduced] = {}
        for (r, k), own in blocks.items():
            key = tuple(sorted(own))
            if key not in others:
                ring = self.reduced.folded.rings[r]
                mine = {self.reduced.folded.number[v] for v in ring.blocks[k]}
                kept = {v: costs[place] for v, place in short.items() if v not in mine}
                others[key] = self._reduced(graph, kept | {v: costs[place] for v, place in own})
            different[r, k] = others[key]
        if not all(self.reduced.alike(each) for each in (reduced, *others.values())):
            return None
        periodic = self.periodic.again(reduced, different)
        if periodic is None:
            return None
        best = Best(graph, self.states)
        periodic.solve(best, deadline)
        return (best, best.cost) if best.cost <= periodic.bound else None

    def changed(self, graph: FactorGraph) -> list[int]:
        """Return the variables whose costs are others."""
        return [v for v, (a, b) in enumerate(zip(self.graph.costs, graph.costs, strict=True)) if a is not b]

    def _sorted(
        self, graph: FactorGraph, places: Mapping[int, int]
    ) -> tuple[dict[int, int], dict[tuple[int, int], _Costs]]:
        """Return the changes outside of the runs and in most of their blocks, and those of blocks that differ.

        The first are by variable of the folded graph, and the others by ring and block.
        """
        folded = self.reduced.folded
        at: dict[int, int] = {id(graph.costs[v]): place for v, place in places.items()}  # equal ones have one
        short: dict[int, int] = {}
        inside: dict[tuple[int, int], set[tuple[int, int]]] = {}
        block_of = {
            v: (r, k) for r, ring in enumerate(folded.rings) for k, block in enumerate(ring.blocks) for v in block
        }
        for v in places:
            change = folded.number[v], at[id(graph.costs[v])]
            if v in block_of:
                inside.setdefault(block_of[v], set()).add(change)
            else:
                short[change[0]] = change[1]
        blocks: dict[tuple[int, int], _Costs] = {}
        for r, ring in enumerate(folded.rings):
            for first in range(ring.period):
                own = {k: frozenset(inside.get((r, k), ())) for k in range(first, len(ring.blocks), ring.period)}
                most, _ = Counter(own.values()).most_common(1)[0]
                short.update(most)
                blocks |= {(r, k): changes for k, changes in own.items() if changes != most}
        return short, blocks

    def _reduced(self, graph: FactorGraph, costs: Mapping[int, Array]) -> Reduced:
        return Reduced(self.reduced.folded.changed(graph, costs), self.reduced.memo)
