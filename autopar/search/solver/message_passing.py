"""Raise a lower bound by sequential tree-reweighted message passing (Kolmogorov, TPAMI 28, 2006).

A reparametrisation moves cost between variables and pairs, so that no assignment changes its cost. Then the sum of the
least costs of all variables and pairs is a lower bound. Each variable in turn collects from its pairs what they cost at
least for each of its states, and hands equal shares on to the pairs with variables that follow. The bound never falls.
Messages are multiples of 2⁻²⁰ ns, so that all sums are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autopar.search.solver.factor_graph import Array, FactorGraph

GRAIN = 2.0**20  # messages are multiples of 1 / GRAIN nanoseconds


class Link:
    """One pair of variables, the lower one first in the order.

    Attributes:
        lower, upper: places of the variables in the order.
        table, left, right: as of an ``Edge``.
        to_lower, to_upper: what the pair has handed to its variables, by ``left`` and ``right``.
    """

    __slots__ = (
        "_least_lower", "_least_upper", "_lower_groups", "_upper_groups", "left", "lower", "right", "table", "to_lower",
        "to_upper", "upper",
    )  # fmt: skip

    def __init__(self, lower: int, upper: int, table: Array, left: Array, right: Array) -> None:
        self.lower, self.upper, self.table, self.left, self.right = lower, upper, table, left, right
        self.to_lower, self.to_upper = np.zeros(table.shape[0]), np.zeros(table.shape[1])
        self._lower_groups, self._upper_groups = _groups(left, table.shape[0]), _groups(right, table.shape[1])
        self._least_lower: Array = table.min(axis=1)
        self._least_upper: Array = self.to_upper

    def start(self, to_lower: Array, to_upper: Array) -> None:
        """Begin with these messages."""
        self.to_lower, self.to_upper = to_lower, to_upper
        self._least_lower, self._least_upper = self.least_for_lower(), self.least_for_upper()

    def least_for_lower(self) -> Array:
        """Return what the pair costs at least for each ``left``, without what it has handed to the lower variable."""
        return (self.table - self.to_upper[None, :]).min(axis=1)

    def least_for_upper(self) -> Array:
        return (self.table - self.to_lower[:, None]).min(axis=0)

    def collect_up(self) -> Array:
        """Hand all to the upper variable, whose lower one has changed; return it by state."""
        self._least_upper = self.to_upper = self.least_for_upper()
        return self.to_upper[self.right]

    def collect_down(self) -> Array:
        self._least_lower = self.to_lower = self.least_for_lower()
        return self.to_lower[self.left]

    def collect_again_up(self) -> Array:
        """Hand all to the upper variable, where only its own share has changed since it collected."""
        self.to_upper = self._least_upper
        return self.to_upper[self.right]

    def collect_again_down(self) -> Array:
        self.to_lower = self._least_lower
        return self.to_lower[self.left]

    def take_from_lower(self, total: Array, count: int) -> Array:
        """Take a share of the lower variable's costs; return it by state."""
        share = _share(total, self._lower_groups, count)
        self.to_lower = self.to_lower - share
        return share if self._lower_groups is None else share[self.left]

    def take_from_upper(self, total: Array, count: int) -> Array:
        share = _share(total, self._upper_groups, count)
        self.to_upper = self.to_upper - share
        return share if self._upper_groups is None else share[self.right]

    def rest(self) -> Array:
        """Return the reparametrised table."""
        return self.table - self.to_lower[:, None] - self.to_upper[None, :]


class MessagePassing:
    """The messages of a factor graph, and the bound that they prove.

    Attributes:
        variables: the variables in the order of the messages; what follows goes by their places in it.
        links: the pairs.
        bound: the best lower bound so far, in nanoseconds.
        lost: how much less the present messages prove: shares are rounded, so a pass may lose some grains.
        renamed: variable of the graph → its number in the graph for which the messages are in the end.
    """

    def __init__(
        self, graph: FactorGraph, variables: Sequence[int], order: Sequence[float], renamed: Sequence[int] | None = None
    ) -> None:
        self.graph, self.renamed = graph, renamed
        self.variables = sorted(variables, key=lambda v: (order[v], v))
        place = {v: k for k, v in enumerate(self.variables)}
        self.costs = [graph.costs[v] for v in self.variables]
        self.below: list[list[Link]] = [[] for _ in self.variables]  # pairs with variables before
        self.above: list[list[Link]] = [[] for _ in self.variables]
        self.links: list[Link] = []
        self.bound, self.lost = -np.inf, 0.0
        tables: dict[tuple[int, bool], Array] = {}
        for (a, b), edge in graph.edges.items():
            if a in place and b in place:
                i, j, left, right = place[a], place[b], edge.left, edge.right
                key = (id(edge.table), i > j)
                table = tables[key] = tables[key] if key in tables else _laid_out(edge.table.T if i > j else edge.table)
                if i > j:
                    i, j, left, right = j, i, right, left
                link = Link(i, j, table, left, right)
                self.links.append(link)
                self.above[i].append(link)
                self.below[j].append(link)

    def start(self, given: Mapping[tuple[int, int], Array]) -> None:
        """Begin with messages: variable and its neighbour → what the pair hands to the variable."""
        for link in self.links:
            lower, upper = self.variables[link.lower], self.variables[link.upper]
            if (lower, upper) in given:
                link.start(given[lower, upper], given[upper, lower])

    def messages(self) -> dict[tuple[int, int], Array]:
        """Return the messages: variable and its neighbour → what the pair hands to the variable."""
        found = {}
        for link in self.links:
            lower, upper = self.variables[link.lower], self.variables[link.upper]
            found[lower, upper], found[upper, lower] = link.to_lower, link.to_upper
        return found

    def run(self, passes: int) -> None:
        """Pass messages up and down so many times."""
        for _ in range(passes):
            self._up()
            self._down()

    def _up(self) -> None:
        for costs, below, above in zip(self.costs, self.below, self.above, strict=True):
            total = costs.copy()
            for link in below:
                total += link.collect_up()
            for link in above:
                total += link.collect_again_down()
            count = max(len(below), len(above))
            for share in [link.take_from_lower(total, count) for link in above]:
                total -= share

    def _down(self) -> None:
        bound = 0.0
        for costs, below, above in zip(self.costs[::-1], self.below[::-1], self.above[::-1], strict=True):
            total = costs.copy()
            for link in above:
                total += link.collect_down()
            for link in below:
                total += link.collect_again_up()
            count = max(len(below), len(above))
            for share in [link.take_from_upper(total, count) for link in below]:
                total -= share
            bound += float(total.min())  # the least rest of each pair is zero now
        self.bound = max(self.bound, bound)
        self.lost = self.bound - bound

    def reparametrised(self, place: int) -> Array:
        """Return the costs of a variable with all messages to it."""
        total = self.costs[place].copy()
        for link in self.below[place]:
            total += link.to_upper[link.right]
        for link in self.above[place]:
            total += link.to_lower[link.left]
        return total

    def collected(self, place: int) -> Array:
        """Return the costs of a variable if all its pairs hand it what they can.

        The bound plus the difference to the least of them is a lower bound of the assignments with that state.
        """
        total = self.costs[place].copy()
        for link in self.below[place]:
            total += link.least_for_upper()[link.right]
        for link in self.above[place]:
            total += link.least_for_lower()[link.left]
        return total

    def decoded(self) -> Array:
        """Return an assignment: in order, the best state given those before and the messages of those that follow."""
        states = np.zeros(len(self.costs), dtype=np.int64)
        for place, costs in enumerate(self.costs):
            total = costs.copy()
            for link in self.below[place]:
                total += link.table[link.left[states[link.lower]]][link.right]
            for link in self.above[place]:
                total += link.least_for_lower()[link.left]
            states[place] = int(total.argmin())
        return states

    def name(self, place: int) -> str:
        return self.graph.names[self.variables[place]]

    def original(self, place: int) -> int:
        """Return the number of a variable in the graph for which the messages are in the end."""
        variable = self.variables[place]
        return variable if self.renamed is None else self.renamed[variable]


def _laid_out(table: Array) -> Array:
    """Return a table with its longer axis contiguous: minima over either axis are several times faster then."""
    return np.asfortranarray(table) if table.shape[0] > table.shape[1] else np.ascontiguousarray(table)


_Groups = tuple[Array, Array] | None  # the order that sorts states by number, and where each number begins


def _groups(numbers: Array, count: int) -> _Groups:
    """Return the groups of states by number; ``None`` if each state has its own, in order."""
    if len(numbers) == count and bool((numbers == np.arange(count)).all()):
        return None
    order = np.argsort(numbers, kind="stable")
    return order, np.searchsorted(numbers[order], np.arange(count))


def _share(total: Array, groups: _Groups, count: int) -> Array:
    """Return the share of the least cost of each group: a multiple of the grain."""
    least = total if groups is None else np.minimum.reduceat(total[groups[0]], groups[1])
    return np.floor(least * (GRAIN / count)) / GRAIN
