"""Minimise over variables exactly, with tables that leave out what is too dear.

Once the least cost of each part is subtracted, all costs are at least zero, and the cost of a part of an assignment is
a lower bound of the whole. So a table keeps only the rows that cost no more than the slack between the best answer and
the bound. Such a table is a join of smaller ones, as of a database.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from autopar.search.solver.factor_graph import Array, FactorGraph

ROWS = 2**20  # the most rows of a table


class TooManyRows(Exception):
    """A table would have more than ``ROWS`` rows."""


class Rows(NamedTuple):
    """The affordable joint states of some variables.

    Attributes:
        states: [rows, variables].
        costs: [rows], at least zero.
        counts: for each variable, one more than its largest state.
    """

    variables: tuple[int, ...]
    states: Array
    costs: Array
    counts: tuple[int, ...]


def rows_of(variables: tuple[int, ...], states: Array, costs: Array) -> Rows:
    counts = tuple((states.max(axis=0) + 1).tolist()) if len(states) else (0,) * len(variables)
    return Rows(variables, states, costs, counts)


NOTHING = rows_of((), np.zeros((1, 0), dtype=np.int32), np.zeros(1))
NO_ROWS = rows_of((), np.zeros((0, 0), dtype=np.int32), np.zeros(0))


def factors_of(graph: FactorGraph) -> tuple[float, list[Rows]]:
    """Return all costs of a graph as rows of at least zero, and the sum of what was subtracted."""
    constant, factors = 0.0, []
    for v, costs in enumerate(graph.costs):
        least = costs.min()
        constant += float(least)
        factors.append(rows_of((v,), np.arange(len(costs), dtype=np.int32)[:, None], costs - least))
    for (i, j), edge in graph.edges.items():
        table = edge.table[np.ix_(edge.left, edge.right)]
        least = table.min()
        constant += float(least)
        grid = np.indices(table.shape, dtype=np.int32).reshape(2, -1).T
        factors.append(rows_of((i, j), grid, (table - least).reshape(-1)))
    return constant, factors


class Minimised:
    """The minimum over some variables of a sum of factors, for all joint states of the others within the slack.

    Attributes:
        rest: the factors of the variables that are left. Infeasible: one of them has no rows.
        constant: what the minimum is above the sum of the rest.
    """

    def __init__(self, factors: Iterable[Rows], eliminated: Iterable[int], slack: float) -> None:
        self.steps: list[tuple[int, Rows]] = []
        of: dict[int, list[Rows]] = {v: [] for v in eliminated}
        self.rest: list[Rows] = []
        self.constant = 0.0
        for factor in factors:
            kept = factor.costs <= slack
            cut = factor if kept.all() else rows_of(factor.variables, factor.states[kept], factor.costs[kept])
            inner = [v for v in cut.variables if v in of]
            for v in inner:
                of[v].append(cut)
            if not inner:
                self.rest.append(cut)
        estimates = {v: (_estimate(rows), v) for v, rows in of.items()}
        while of:
            _, variable = min(estimates.values())
            del estimates[variable]
            made = join(of.pop(variable), slack)
            others = tuple(v for v in made.variables if v != variable)
            self.steps.append((variable, made))
            inner = [v for v in others if v in of]
            least = _least(made, others)
            if len(least.costs) and (rise := float(least.costs.min())):  # all that follows costs so much more
                least = least._replace(costs=least.costs - rise)
                self.constant += rise
                slack -= rise
            for v in inner:
                of[v] = [f for f in of[v] if variable not in f.variables]
                of[v].append(least)
                estimates[v] = (_estimate(of[v]), v)
            if not inner:
                self.rest.append(least)
            if not len(least.costs):
                self.rest = [NO_ROWS]
                return

    @property
    def feasible(self) -> bool:
        return all(len(rows.costs) for rows in self.rest)

    def complete(self, states: dict[int, int]) -> None:
        """Add the best states of the eliminated variables to those of the others."""
        for variable, rows in reversed(self.steps):
            fits = np.ones(len(rows.costs), dtype=bool)
            for k, v in enumerate(rows.variables):
                if v != variable:
                    fits &= rows.states[:, k] == states[v]
            places = np.nonzero(fits)[0]
            best = places[rows.costs[places].argmin()]
            states[variable] = int(rows.states[best, rows.variables.index(variable)])


def solve_exactly(
    factors: Iterable[Rows], variables: Iterable[int], slack: float
) -> tuple[float, dict[int, int]] | None:
    """Return the least sum of factors and an assignment; ``None`` if all cost more than the slack.

    Raises:
        TooManyRows: a table would be too large.
    """
    done = Minimised(factors, variables, slack)
    if not done.feasible:
        return None
    cost = done.constant + sum(float(rows.costs.min()) for rows in done.rest)
    if cost > slack:
        return None
    states: dict[int, int] = {}
    done.complete(states)
    return cost, states


def join(factors: Sequence[Rows], slack: float) -> Rows:
    """Return the affordable joint states of all variables of some factors."""
    joined = NOTHING
    for factor in sorted(factors, key=lambda f: (len(f.costs), f.variables)):
        joined = _pair(joined, factor, slack)
    return joined


def _estimate(factors: list[Rows]) -> float:
    """Return about how many rows the join has: the product of the sizes, with shared variables counted once."""
    scope: dict[int, int] = {}
    for factor in factors:
        for v, count in zip(factor.variables, factor.counts, strict=True):
            scope[v] = min(scope.get(v, count), count)
    total = 1.0
    for count in scope.values():
        total *= count
    return total


def _pair(a: Rows, b: Rows, slack: float) -> Rows:
    """Return the affordable pairs of rows that agree on common variables."""
    common = [v for v in a.variables if v in b.variables]
    new = [k for k, v in enumerate(b.variables) if v not in a.variables]
    key_a, key_b = _keys(a, b, common)
    order = np.argsort(key_b, kind="stable")
    ordered = key_b[order]
    begin, end = np.searchsorted(ordered, key_a, "left"), np.searchsorted(ordered, key_a, "right")
    count = end - begin
    if int(count.sum()) > 4 * ROWS:
        raise TooManyRows
    left = np.repeat(np.arange(len(key_a)), count)
    offset = np.arange(len(left)) - np.repeat(np.cumsum(count) - count, count)
    right = order[np.repeat(begin, count) + offset]
    costs = a.costs[left] + b.costs[right]
    kept = costs <= slack
    left, right = left[kept], right[kept]
    if len(left) > ROWS:
        raise TooManyRows
    states = np.concatenate([a.states[left], b.states[right][:, new]], axis=1)
    return rows_of((*a.variables, *(b.variables[k] for k in new)), states, costs[kept])


def _keys(a: Rows, b: Rows, common: list[int]) -> tuple[Array, Array]:
    """Number the rows of both by their states of the common variables."""
    keys, size = np.zeros(len(a.costs) + len(b.costs), dtype=np.int64), 1
    for v in common:
        i, j = a.variables.index(v), b.variables.index(v)
        column = np.concatenate([a.states[:, i], b.states[:, j]])
        keys, size = _with_column(keys, size, column, max(a.counts[i], b.counts[j]))
    return keys[: len(a.costs)], keys[len(a.costs) :]


def _with_column(keys: Array, size: int, column: Array, count: int) -> tuple[Array, int]:
    """Number rows by their numbers below ``size`` and one more state below ``count``; also return the new size."""
    if size * count > 2**62:  # joint states of many variables: number those that are there
        different, keys = np.unique(keys, return_inverse=True)
        size = len(different)
    return keys * count + column, size * count


def _least(rows: Rows, others: tuple[int, ...]) -> Rows:
    """Return the least cost for each joint state of the other variables."""
    if not others or not len(rows.costs):
        kept = slice(0, 1 if len(rows.costs) else 0)
        return rows_of(
            others,
            np.zeros((len(rows.costs), len(others)), dtype=np.int32)[kept],
            rows.costs.min(initial=np.inf, keepdims=True)[kept],
        )
    places = [rows.variables.index(v) for v in others]
    columns = rows.states[:, places]
    key, size = np.zeros(len(columns), dtype=np.int64), 1
    for k, place in enumerate(places):
        key, size = _with_column(key, size, columns[:, k], rows.counts[place])
    order = np.lexsort((rows.costs, key))
    first = np.ones(len(order), dtype=bool)
    first[1:] = key[order][1:] != key[order][:-1]
    chosen = order[first]
    return rows_of(others, columns[chosen], rows.costs[chosen])
