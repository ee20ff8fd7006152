"""Bound the memory that a plan needs from below, as a sum over the variables of the search.

The program runs in its order, and at each op it holds what stays (parameters, states, inputs) and the values that are
still read. Each of these is a *claim*: so many bytes for each state of one variable, from one op to another.

    h : f32[64 256] = mm(x, w)         claims of h at its op: its whole piece
    r : f32[64 256] = relu(h)          until its last reader: what is kept of it
                                       at its last reader: the piece that this one reads

Results of views are in the memory of their operand. Gathered and other transferred copies are not counted, and what a
transfer may free is not counted either. So no program needs less than the claims of its plan; ``usage`` says what it
needs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.search.solver.factor_graph import Array, FactorGraph
from autopar.search.solver.message_passing import GRAIN


class Claim(NamedTuple):
    """Bytes that a plan holds from one position of the program to another one, both included.

    Attributes:
        bytes: for each state of the variable.
    """

    variable: int
    bytes: Array
    first: int
    last: int


class Gathered(NamedTuple):
    """The copy that an op reads of a value which stays, where it is larger than the value.

    Attributes:
        value, reader: variables.
        left, right: numbers of the layouts, for each state of the value and of the reader.
        bytes: of the copy: [layouts of the value, layouts that the reader needs].
    """

    value: int
    reader: int
    left: Array
    right: Array
    bytes: Array


@dataclass(frozen=True)
class MemoryModel:
    """The claims of all plans of a program.

    Attributes:
        claims: all of them.
        length: the number of positions: the nodes of the program. The last one, the output, stands for the update.
        gathered: position of an op → the copies that it reads.
    """

    claims: Sequence[Claim]
    length: int
    gathered: Mapping[int, Sequence[Gathered]]

    def held(self, states: Array) -> Array:
        """Return the bytes at each position."""
        changes = np.zeros(self.length + 1)
        for claim in self.claims:
            bytes = claim.bytes[states[claim.variable]]
            changes[claim.first] += bytes
            changes[claim.last + 1] -= bytes
        held = np.cumsum(changes[:-1])
        for position, copies in self.gathered.items():
            for value, reader, left, right, bytes in copies:
                held[position] += bytes[left[states[value]], right[states[reader]]]
        return held

    def weighted(
        self, graph: FactorGraph, weights: Mapping[int, float], only: Collection[int] | None = None
    ) -> FactorGraph:
        """Return a graph whose costs have the bytes at some positions too.

        Costs of bytes are rounded down, so a bound of the graph is a bound of the weighted sum. Equal variables keep
        equal costs.

        Args:
            weights: position → nanoseconds for a byte.
            only: the variables whose bytes count; all by default.
        """
        rows: dict[int, dict[int, tuple[Array, float]]] = {}
        for variable, bytes, first, last in self.claims:
            weight = sum(value for position, value in weights.items() if first <= position <= last)
            if weight and (only is None or variable in only):
                own = rows.setdefault(variable, {})
                own[id(bytes)] = bytes, own.get(id(bytes), (bytes, 0.0))[1] + weight
        known: dict[object, Array] = {}
        costs = list(graph.costs)
        for variable, own in rows.items():
            key = (id(costs[variable]), *((number, weight) for number, (_, weight) in own.items()))
            if key not in known:
                added = sum(np.floor(bytes * (weight * GRAIN)) / GRAIN for bytes, weight in own.values())
                known[key] = graph.intern(costs[variable] + added)
            costs[variable] = known[key]
        priced = FactorGraph(graph.intern, costs, graph.names, dict(graph.edges))
        for position, weight in weights.items():
            for value, reader, left, right, bytes in self.gathered.get(position, ()):
                if weight and (only is None or {value, reader} <= set(only)):
                    priced.add_edge(value, reader, left, right, np.floor(bytes * (weight * GRAIN)) / GRAIN)
        return priced
