"""Prove a bound of a graph with long runs from messages that all blocks of a run have in common.

Messages are passed on the folded graph, whose variables and edges cost as often as they stand for others. Each block
takes its share of them. Then the ring is closed, as if the run had no ends, and its messages settle. The blocks beside
the run, and all others, follow, with the messages of the ring to them. The bound is that of one ring, as often as it
stands in the run, and that of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autopar.search.solver.factor_graph import Array, FactorGraph
from autopar.search.solver.fold import Crossing, Ring
from autopar.search.solver.message_passing import GRAIN, Link, MessagePassing
from autopar.search.solver.reduced import Reduced

PASSES = 5  # of messages, between two looks at a bound
MOST_PASSES = 30
Messages = Mapping[tuple[int, int], Array]  # variable and its neighbour → what the pair hands to the variable
SLOW = 1e-6  # the relative rise of a bound over so many passes that is too little to go on


class Border(NamedTuple):
    """The variables between two blocks that follow each other: for each edge between them, one of its ends.

    Attributes:
        lower: the places of those in the first block.
        upper: the places of those in the second block.
    """

    lower: tuple[int, ...]
    upper: tuple[int, ...]


def border(graph: FactorGraph, block: Sequence[int], crossings: Sequence[Crossing]) -> Border:
    """Return the ends with fewer states; no variable is on the borders on both sides of its block."""
    lower = {p for p, q, _ in crossings if len(graph.costs[block[p]]) <= len(graph.costs[block[q]])}
    upper = {q for p, q, _ in crossings if p not in lower}
    if lower & upper:
        lower, upper = {p for p, *_ in crossings}, set()
    return Border(tuple(sorted(lower)), tuple(sorted(upper)))


class Piece(NamedTuple):
    """A part of the reparametrised graph.

    Attributes:
        passing: its messages, with a bound.
        before, after: its variables on the borders, or those on the borders of the run.
        outside: variables of other parts that it has edges with → its own number of them.
        own: its first variables, in the reduced graph.
    """

    passing: MessagePassing
    before: list[int]
    after: list[int]
    outside: dict[int, int]
    own: list[int]


class TiedRing:
    """The messages of a closed ring.

    Attributes:
        passing: of the variables of the ring; ``numbers`` has theirs in the reduced graph.
        to_outside: variable outside of the ring → its costs from all blocks of the run.
    """

    def __init__(
        self, reduced: Reduced, ring: Ring, given: Messages, order: Sequence[float], earlier: TiedRing | None = None,
        passes: int = PASSES,
    ) -> None:  # fmt: skip
        """Settle the messages.

        Args:
            earlier: the ring whose messages this one, which is alike, begins with.
        """
        graph, alive = reduced.graph, set(reduced.left)
        self.reduced, self.ring = reduced, ring
        self.blocks = reduced.folded.blocks(ring)
        self.numbers = [v for block in self.blocks for v in block if v in alive]
        self.own = {v: k for k, v in enumerate(self.numbers)}
        self.border = border(graph, self.blocks[0], ring.crossings)
        costs = {v: graph.costs[v].copy() for v in self.numbers}
        self.to_outside: dict[int, Array] = {}
        self.outer: list[tuple[int, int, Array, Array, Array]] = []  # outside, own, and the rest of the edge
        closed, inner = FactorGraph(graph.intern), []
        beside = {reduced.folded.number[v] for v in (*ring.before, *ring.after)}
        for (i, j), edge in graph.edges.items():
            count = reduced.edge_times((i, j))
            if i in self.own and j in self.own:
                inner.append((i, j, edge))
            elif (i in self.own or j in self.own) and not (count == 1 and {i, j} & beside):
                other, v, left, right, table = (
                    (i, j, *edge) if j in self.own else (j, i, edge.right, edge.left, edge.table.T)
                )
                mine = given[v, other]
                costs[v] += mine[right]
                theirs = (table - mine[None, :]).min(axis=1)
                self.to_outside[other] = self.to_outside.get(other, 0.0) + count * theirs[left]
                self.outer.append((other, v, left, right, table - mine[None, :] - theirs[:, None]))
        for v in self.numbers:
            closed.add_variable(graph.names[v], costs[v])
        for i, j, edge in inner:
            closed.add_edge(self.own[i], self.own[j], *edge)
        self.passing = MessagePassing(closed, range(len(self.numbers)), [order[v] for v in self.numbers])
        self.passing.start(_renamed(given, self.own) if earlier is None else earlier.passing.messages())
        self.passing.run(passes)
        self.links: dict[tuple[int, int], Link] = {}
        self.place = {self.numbers[v]: k for k, v in enumerate(self.passing.variables)}
        for link in self.passing.links:
            self.links[link.lower, link.upper] = link

    def rest(self, i: int, j: int) -> tuple[Array, Array, Array]:
        """Return the left and right numbers and the rest of the edge of two variables, the first at the left."""
        a, b = self.place[i], self.place[j]
        if a < b:
            link = self.links[a, b]
            return link.left, link.right, link.rest()
        link = self.links[b, a]
        return link.right, link.left, link.rest().T

    def message(self, to: int, other: int) -> Array:
        """Return what a variable has from its edge with another one, by state."""
        a, b = self.place[to], self.place[other]
        link = self.links[min(a, b), max(a, b)]
        return link.to_lower[link.left] if a < b else link.to_upper[link.right]

    def pieces(self, passes: int = PASSES) -> list[Piece]:
        """Return the parts of the blocks of the ring, after so many passes of messages of their own."""
        return [self.piece(k, passes) for k in range(len(self.blocks))]

    def piece(self, k: int, passes: int = PASSES) -> Piece:
        """Return the part of one block."""
        graph, numbers, period = FactorGraph(), dict[object, int](), len(self.blocks)  # its tables are of no other
        block, lower, upper = self.blocks[k], self.blocks[k - 1], self.blocks[(k + 1) % period]
        names, costs, order = self.reduced.graph.names, self.reduced.graph.costs, []

        def number(key: object, v: int, own: Array | None = None) -> int:
            if key not in numbers:
                numbers[key] = graph.add_variable(names[v], np.zeros(len(costs[v])) if own is None else own)
                order.append(float(self.place.get(v, -1)))
            return numbers[key]

        mine = set(block)
        for v in block:
            if v in self.own:
                number(v, v, self.passing.reparametrised(self.place[v]))
        for i, j in ((self.numbers[a], self.numbers[b]) for a, b in self.passing.graph.edges):
            if i in mine and j in mine:
                graph.add_edge(number(i, i), number(j, j), *self.rest(i, j))
        outside = {}
        for other, v, *edge in self.outer:
            if v in mine:
                outside[other] = number(("outside", other), other)
                graph.add_edge(outside[other], number(v, v), *edge)
        for p, q, _ in self.ring.crossings:
            if p in self.border.lower:
                graph.add_edge(
                    number(("before", p), lower[p]), number(block[q], block[q]), *self.rest(lower[p], block[q])
                )
            if p not in self.border.lower:
                graph.add_edge(
                    number(block[p], block[p]), number(("after", q), upper[q]), *self.rest(block[p], upper[q])
                )
        passing = MessagePassing(graph, range(len(order)), order)
        passing.run(passes)
        before = [numbers["before", p] for p in self.border.lower] + [numbers[block[q]] for q in self.border.upper]
        after = [numbers[block[p]] for p in self.border.lower] + [numbers["after", q] for q in self.border.upper]
        return Piece(passing, before, after, outside, [v for v in block if v in self.own])


class Ends:
    """What is outside of the rings, with the messages of the rings to it.

    Attributes:
        passing: its messages.
        own: variable of the reduced graph → its number here.
        borders: for each ring, its variables on the borders before and after the run.
    """

    def __init__(
        self, reduced: Reduced, rings: Sequence[TiedRing], given: Messages, order: Sequence[float],
        earlier: Ends | None = None,
    ) -> None:  # fmt: skip
        graph, number = reduced.graph, reduced.folded.number
        inside = {v for ring in rings for v in ring.numbers}
        variables = [v for v in reduced.left if v not in inside]
        self.own = {v: k for k, v in enumerate(variables)}
        costs = [graph.costs[v].copy() for v in variables]
        places = [order[v] for v in variables]
        short, self.borders = FactorGraph(graph.intern), list[tuple[list[int], list[int]]]()
        names = [graph.names[v] for v in variables]
        edges: list[tuple[int, int, Array, Array, Array]] = []

        def beside(v: int) -> int:
            """Add a variable of a ring; its costs are those of the ring."""
            costs.append(np.zeros(len(graph.costs[v])))
            names.append(graph.names[v])
            places.append(order[v])
            return len(costs) - 1

        for ring in rings:
            for v, theirs in ring.to_outside.items():
                costs[self.own[v]] += theirs
            first, last, (low, up) = ring.blocks[0], ring.blocks[-1], ring.border
            before = {p: self.own[number[ring.ring.before[p]]] for p, *_ in ring.ring.crossings}
            after = {q: self.own[number[ring.ring.after[q]]] for _, q, _ in ring.ring.crossings}
            entry, exit = {q: beside(first[q]) for q in up}, {p: beside(last[p]) for p in low}
            for p, q, _ in ring.ring.crossings:
                costs[before[p]] += ring.message(last[p], first[q])
                costs[after[q]] += ring.message(first[q], last[p])
                rest = ring.rest(last[p], first[q])
                edges.append((exit[p], after[q], *rest) if p in low else (before[p], entry[q], *rest))
            self.borders.append((
                [before[p] for p in low] + [entry[q] for q in up], [exit[p] for p in low] + [after[q] for q in up],
            ))  # fmt: skip
        for name, each in zip(names, costs, strict=True):
            short.add_variable(name, each)
        for (i, j), edge in graph.edges.items():
            if i in self.own and j in self.own:
                short.add_edge(self.own[i], self.own[j], *edge)
        for each in edges:
            short.add_edge(*each)
        self.passing = MessagePassing(short, range(len(costs)), places)
        self.passing.start(_renamed(given, self.own) if earlier is None else earlier.passing.messages())


def _renamed(given: Messages, own: Mapping[int, int]) -> Messages:
    """Return the messages among some variables, by other numbers of them."""
    return {(own[i], own[j]): message for (i, j), message in given.items() if i in own and j in own}


def shares(passing: MessagePassing, reduced: Reduced) -> Messages:
    """Return the messages for one of the edges that an edge of the weighted graph stands for, in whole grains."""
    return {
        ends: np.floor(message * (GRAIN / reduced.edge_times((min(ends), max(ends))))) / GRAIN
        for ends, message in passing.messages().items()
    }


def settle(passing: MessagePassing, most: int = MOST_PASSES) -> None:
    """Pass messages until the bound hardly rises."""
    last = -np.inf
    for _ in range(most // PASSES):
        passing.run(PASSES)
        if passing.bound - last < SLOW * abs(passing.bound):
            return
        last = passing.bound
