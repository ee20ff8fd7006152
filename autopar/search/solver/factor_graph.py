"""Hold a sum of costs of single variables and of pairs, with tables that equal parts of a program share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

Array = np.ndarray


class Edge(NamedTuple):
    """The cost of two variables: ``table[left[x], right[y]]`` nanoseconds for the states x and y.

    Many states of a variable ask for the same layout of a value; ``left`` and ``right`` number the different ones.
    """

    left: Array
    right: Array
    table: Array


class Interned:
    """Keeps one array for equal contents, so that equality is identity."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[object, ...], Array] = {}
        self._ids: set[int] = set()  # of these arrays

    def __call__(self, array: Array) -> Array:
        if id(array) in self._ids:
            return array
        array = np.ascontiguousarray(array)
        key = (array.shape, array.dtype.char, array.tobytes())
        found = self._arrays.get(key)
        if found is None:
            array.setflags(write=False)
            found = self._arrays[key] = array
            self._ids.add(id(array))
        return found


@dataclass
class FactorGraph:
    """Variables with finitely many states, their costs, and the costs of pairs.

    Attributes:
        costs: the cost of each state of each variable, in nanoseconds.
        edges: (i, j) with i < j → the cost of the pair.
        names: of the variables, for errors and tables.
    """

    intern: Interned = field(default_factory=Interned)
    costs: list[Array] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    edges: dict[tuple[int, int], Edge] = field(default_factory=dict)
    _merged: dict[tuple[int, ...], Edge] = field(default_factory=dict)

    def add_variable(self, name: str, costs: Iterable[float]) -> int:
        self.costs.append(self.intern(np.asarray(costs, dtype=np.float64)))
        self.names.append(name)
        return len(self.costs) - 1

    def add_edge(self, i: int, j: int, left: Array, right: Array, table: Array) -> None:
        """Add the cost of a pair to what it has."""
        if i > j:
            i, j, left, right, table = j, i, right, left, table.T
        left, table = _used(left, table)
        right, transposed = _used(right, table.T)
        table = transposed.T
        edge = Edge(self.intern(left), self.intern(right), self.intern(table))
        known = self.edges.get((i, j))
        self.edges[i, j] = edge if known is None else self._sum(known, edge)

    def _sum(self, a: Edge, b: Edge) -> Edge:
        key = tuple(map(id, (*a, *b)))
        found = self._merged.get(key)
        if found is None:
            left, left_a, left_b = _pairs(a.left, b.left)
            right, right_a, right_b = _pairs(a.right, b.right)
            table = a.table[np.ix_(left_a, right_a)] + b.table[np.ix_(left_b, right_b)]
            found = self._merged[key] = Edge(self.intern(left), self.intern(right), self.intern(table))
        return found

    def energy(self, states: Array) -> float:
        """Return the cost of an assignment, a state for each variable."""
        total = sum(float(costs[x]) for costs, x in zip(self.costs, states, strict=True))
        for (i, j), edge in self.edges.items():
            total += float(edge.table[edge.left[states[i]], edge.right[states[j]]])
        return total


def _used(numbers: Array, table: Array) -> tuple[Array, Array]:
    """Leave out the rows of a table that no state has."""
    used = np.bincount(numbers, minlength=len(table)) > 0
    return (numbers, table) if used.all() else ((np.cumsum(used) - 1)[numbers], table[used])


def _pairs(a: Array, b: Array) -> tuple[Array, Array, Array]:
    """Number the different pairs; also the members of each."""
    pairs, inverse = np.unique(np.stack([a, b], axis=1), axis=0, return_inverse=True)
    return inverse.reshape(-1), pairs[:, 0], pairs[:, 1]
