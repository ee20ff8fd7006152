"""Bound the cheapest plan by a problem of the same form, the *outline*: its prices of transfers are bounds.

What two uses of a value share is a path of transfers that ends in some layout. This is the state of a variable of its
own, a *branch*, and each use pays its transfers from there. So no plan costs less than its assignment of the outline.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autopar.ir.layout import DistAttr
from autopar.search.problem.groups import GROUP
from autopar.search.problem.problem import Problem, Reader, Value
from autopar.search.solver.factor_graph import FactorGraph
from autopar.search.transfer_prices.chains import State
from autopar.search.transfer_prices.classes import UNREAD
from autopar.search.transfer_prices.places import FIRST, Places, numbers_of, odd_pairs
from autopar.transitions.axis_prices import Prices, prices_of
from autopar.transitions.least_prices import FAR_OFF, OTHER, OWN, PENDING, least_prices
from autopar.transitions.plan import has_room

_Ends = tuple[int, np.ndarray]  # a variable, and the number of the layout of each of its states


class Tie(NamedTuple):
    """Two variables of which one tells the other: ``equal`` is the state of the other for each of its own."""

    variable: int
    other: int
    equal: np.ndarray


class Outline:
    """The outline of a problem whose values have no prices of transfers yet.

    Attributes:
        graph: its variables are those of the problem, in order, and after these the branches.
        order, labels: as of ``Problem``.
        states: for each variable of the problem, the state here of each of its states.
    """

    def __init__(self, problem: Problem, ties: Sequence[Tie] = ()) -> None:
        self.problem = problem
        self.graph = FactorGraph()
        self.order, self.labels = list(problem.order), list(problem.labels)
        self._prices = prices_of(problem.mesh, problem.chains.machine)
        self._tables: dict[object, np.ndarray] = {}
        self._rows: dict[object, _View] = {}
        views = {id(value): self._view(value) for value in problem.values.values()}
        columns: list[list[np.ndarray]] = [[] for _ in problem.graph.costs]
        for value in problem.values.values():
            view = views[id(value)]
            columns[value.variable].append(view.of[value.states])
            for reader in value.readers:
                columns[reader.variable].append(view.of[reader.states])
        self.states = []
        self._firsts: list[np.ndarray] = []
        for variable, costs in enumerate(problem.graph.costs):
            table = np.stack([*columns[variable], np.zeros(len(costs), dtype=np.int64)])
            _, first, numbers = np.unique(table, axis=1, return_index=True, return_inverse=True)
            numbers = numbers.reshape(-1)
            least = np.full(len(first), np.inf)
            np.minimum.at(least, numbers, costs)
            self.graph.add_variable(problem.graph.names[variable], least)
            self.states.append(numbers)
            self._firsts.append(first)
        for value in problem.values.values():
            self._pay(value, views[id(value)])
        for tie in ties:
            self._add_tie(tie)

    def add_costs(self, variable: int, costs: np.ndarray) -> None:
        """Add costs of the states of a variable of the problem, of which the least counts."""
        least = np.full(len(self._firsts[variable]), np.inf)
        np.minimum.at(least, self.states[variable], costs)
        self.graph.costs[variable] = self.graph.intern(self.graph.costs[variable] + _rounded(least))

    def add_pair(self, variable: int, other: int, table: np.ndarray) -> None:
        """Add costs of the states of two variables of the problem, of which the least counts."""
        left, right = self.states[variable], self.states[other]
        least = np.full((len(self._firsts[variable]), len(self._firsts[other])), np.inf)
        np.minimum.at(least, (left[:, None], right[None]), table)
        self.graph.add_edge(variable, other, np.arange(len(least)), np.arange(least.shape[1]), _rounded(least))

    def _add_tie(self, tie: Tie) -> None:
        left, right = self.states[tie.variable], self.states[tie.other][tie.equal]
        table = np.full((left.max() + 1, len(self._firsts[tie.other])), float(self.problem.chains.impossible))
        table[left, right] = 0.0
        self.graph.add_edge(tie.variable, tie.other, np.arange(len(table)), np.arange(table.shape[1]), table)

    # -- values ------------------------------------------------------------------------------------------------------

    def _view(self, value: Value) -> _View:
        """Return the different layouts of a value, and their numbers."""
        lists = dict.fromkeys([value.states, *(reader.states for reader in value.readers)])
        key = value.type.shape, tuple(lists)
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = _View(value.type.shape, list(lists), self._prices)
        return found

    def _pay(self, value: Value, view: _View) -> None:
        """Add the prices of the transfers of a value."""
        phases: dict[str, list[Reader]] = {}
        for reader in value.readers:
            phases.setdefault(reader.phase, []).append(reader)
        home = view.of[value.states][self._firsts[value.variable]]
        root, part = (value.variable, home), 1.0
        if len(phases) > 1:
            narrows = value.computed and any(r.states[0][1].itemsize < value.type.dtype.itemsize for r in value.readers)
            gathers = value.parameter and any(value.turns(r) for r in value.readers)
            if narrows or gathers or view.pending[home].any():
                if len(value.readers) == 2:
                    root = self._kept(value, view, root, narrows, gathers)
                else:  # what phases share may part at several layouts, so each counts by its fraction
                    part = 1 / len(phases)
        for every in phases.values():
            groups = [every] if len(every) <= GROUP else _by_block(every)
            for readers in groups:
                self._use(value, view, root, readers, part / len(groups))

    def _use(
        self, value: Value, view: _View, root: tuple[int, np.ndarray], readers: list[Reader], share: float
    ) -> None:
        """Add the prices of the transfers before readers in one phase.

        A transfer is before some of them. Each pair of the first one with another pays for it, if one of the two does.
        """
        ends = [(r.variable, view.of[r.states][self._firsts[r.variable]]) for r in readers]
        if len(ends) == 1:
            self._join(value, view, root, ends[0], share)
        for reader, other in zip(readers[1:], ends[1:], strict=True):
            blocks = [readers[0].block, reader.block]
            self._branch(value, blocks, view, root, ends[0], other, share / (len(ends) - 1))

    def _kept(self, value: Value, view: _View, root: _Ends, narrows: bool, gathers: bool) -> _Ends:
        """Return the variable of where the transfers end that all phases share."""
        used, left = np.unique(root[1], return_inverse=True)
        table = view.bounds(used, np.arange(view.count), {"narrows": narrows, "gathers": gathers})
        reached = np.nonzero((table.min(axis=0) < FAR_OFF) & ~view.unread)[0]
        variable = self._add(value, [r.block for r in value.readers], len(reached))
        penalty = float(self.problem.chains.impossible)
        self.graph.add_edge(root[0], variable, left, np.arange(len(reached)), np.minimum(table[:, reached], penalty))
        return variable, reached

    def _branch(self, value: Value, blocks: list[str], view: _View, root, one, other, share: float) -> None:
        """Add a variable for where the paths of two uses part."""
        variable = self._add(value, blocks, view.count)
        self.graph.costs[variable] = self.graph.intern(np.where(view.unread, self.problem.chains.impossible, 0.0))
        branch = variable, np.arange(view.count)
        self._join(value, view, root, branch, share)
        self._join(value, view, branch, one, share)
        self._join(value, view, branch, other, share)

    def _add(self, value: Value, blocks: list[str], count: int) -> int:
        self.order.append(self.problem.order[value.variable] + 0.5)
        self.labels.append(blocks[0] if len(set(blocks)) == 1 else self.problem.labels[value.variable])
        return self.graph.add_variable(f"{value.name}'", np.zeros(count))

    def _join(self, value: Value, view: _View, a: _Ends, b: _Ends, share: float) -> None:
        """Add the price of the transfers from the states of one variable to those of another."""
        (used, left), (needed, right) = (np.unique(ids, return_inverse=True) for _, ids in (a, b))
        table = self._table(value, view, used, needed, share)
        if a[0] == b[0]:
            self.graph.costs[a[0]] = self.graph.intern(self.graph.costs[a[0]] + table[left, right])
        else:
            self.graph.add_edge(a[0], b[0], left, right, table)

    def _table(self, value: Value, view: _View, haves: np.ndarray, needs: np.ndarray, share: float) -> np.ndarray:
        """Return a fraction of the bounds of prices between layouts, given by number: [haves, needs]."""
        key = id(view), haves.tobytes(), needs.tobytes(), share
        if key not in self._tables:
            table = np.minimum(view.bounds(haves, needs, None), float(self.problem.chains.impossible))
            self._tables[key] = self.graph.intern(_rounded(table * share))
        return self._tables[key]


def _by_block(readers: list[Reader]) -> list[list[Reader]]:
    found: dict[str, list[Reader]] = {}
    for reader in readers:
        found.setdefault(reader.block, []).append(reader)
    return list(found.values())


def _rounded(costs: np.ndarray) -> np.ndarray:
    """Round down, so that all sums are exact."""
    return np.floor(costs * 2**20) / 2**20


class _View:
    """The layouts of a value: those of states, and then all others, of which only the parts of axes are told.

    Attributes:
        of: tuple of states → their numbers.
        known: how many layouts states have.
        count: how many there are with the others.
        pending: whether an axis is pending in a layout.
        unread: which of them stand for a value that is not read, and needs no transfers.
    """

    def __init__(self, shape: tuple[int, ...], lists: Sequence[tuple[State, ...]], prices: Prices) -> None:
        self._elements, self._prices, self._room = math.prod(shape), prices, has_room(shape, prices.mesh)
        different = list(dict.fromkeys(state for states in lists for state in states))
        layouts = [DistAttr.replicated(len(shape)) if attr == UNREAD else attr for attr, _ in different]
        attrs = list(dict.fromkeys(layouts))
        places = Places(shape, attrs, prices)
        placed = places.of(attrs)
        self._dtypes = list(dict.fromkeys(dtype for _, dtype in different))
        dtypes = np.array([self._dtypes.index(dtype) for _, dtype in different])
        kinds = [kind for attr in attrs for _, kind in attr.pending]
        self._kind = kinds[0] if kinds else "sum"
        number = {attr: k for k, attr in enumerate(attrs)}
        rows = np.array([number[attr] for attr in layouts])
        self.of = {}
        numbers = dict(zip(different, range(len(different)), strict=True))
        for states in lists:
            self.of[states] = np.array([numbers[state] for state in states])
        self.known = len(different)
        parts, spots = placed.places[rows], placed.spots[rows]
        options = [0, *([PENDING] if kinds else []), *range(FIRST, places.count)]
        every = np.array(list(itertools.product(options, repeat=len(prices.sizes))), dtype=np.int64)
        self.count = self.known + len(every) * len(self._dtypes)
        self._parts = np.concatenate([parts, *[every] * len(self._dtypes)])
        self._spots = spots
        self.unread = np.array([k < self.known and different[k][0] == UNREAD for k in range(self.count)])
        self._dtype = np.concatenate([dtypes, np.repeat(np.arange(len(self._dtypes)), len(every))])
        self._odd = odd_pairs(placed, placed) | (not self._room)
        self._attr, self._loose = rows, placed.loose[rows]
        self.pending = (self._parts == PENDING).any(axis=1)

    def bounds(self, haves: np.ndarray, needs: np.ndarray, kept: Mapping[str, bool] | None) -> np.ndarray:
        """Return bounds of the prices between layouts: [haves, needs], in nanoseconds.

        Args:
            kept: the arguments of ``least_prices`` for transfers that all phases share; ``None``: of all transfers.
        """
        found = np.full((len(haves), len(needs)), FAR_OFF)
        for here, there in itertools.product(*(np.unique(numbers >= self.known) for numbers in (haves, needs))):
            a, b = (np.nonzero((ids >= self.known) == other)[0] for ids, other in ((haves, here), (needs, there)))
            found[np.ix_(a, b)] = self._bounds(haves[a], needs[b], bool(here), bool(there), kept)
        return found

    def _bounds(self, haves: np.ndarray, needs: np.ndarray, here: bool, there: bool, kept) -> np.ndarray:
        if here or there:
            i, j = numbers_of(self._parts[haves], self._parts[needs])
            odd = np.ones(i.shape, dtype=bool)
        else:
            i, j = numbers_of(self._spots[haves], self._spots[needs])
            odd = self._odd[np.ix_(self._attr[haves], self._attr[needs])]
        found = np.full(i.shape, FAR_OFF)
        renews = bool(self.pending[needs].any())
        for (x, have), (y, need) in itertools.product(enumerate(self._dtypes), repeat=2):
            at = np.ix_(np.nonzero(self._dtype[haves] == x)[0], np.nonzero(self._dtype[needs] == y)[0])
            if not found[at].size:
                continue
            if kept is not None:
                bounds = least_prices(self._prices, self._elements, (have, need), self._kind, **kept)
                found[at] = bounds.kept[i[at], j[at]]
                continue
            even, uneven = (least_prices(self._prices, self._elements, (have, need), self._kind, renews=renews, odd=odd)
                            for odd in (False, True))  # fmt: skip
            found[at] = np.where(odd[at], uneven.table[i[at], j[at]], even.table[i[at], j[at]])
            if here != there and x == y:
                found[at] = np.maximum(found[at], self._moved(haves, needs, here, i, j, at, uneven.table))
        loose = [np.full(len(ids), self._loose.any()) if other else self._loose[ids]
                 for ids, other in ((haves, here), (needs, there))]  # fmt: skip
        found[loose[0][:, None] | loose[1][None]] = 0.0
        found[:, self.unread[needs]] = 0.0
        return found

    def _moved(self, haves, needs, here: bool, i, j, at, table: np.ndarray) -> np.ndarray:
        """Return what it takes at least to be in the same parts as a layout, and another layout: else 0."""
        a, b = self._parts[haves][:, None], self._parts[needs][None]
        other = a if here else b
        split = np.broadcast_to(other >= FIRST, (*i.shape, a.shape[2]))
        same = (~split | (a == b)).all(axis=2) & split.any(axis=2)
        least = np.full(i.shape, FAR_OFF)
        for k in range(a.shape[2]):
            moved = np.where(same & split[..., k], j + (OTHER - OWN) * 4**k, -1)
            ok = moved >= 0
            least[ok] = np.minimum(least[ok], table[i[ok], moved[ok]])
        return np.where(same, least, 0.0)[at]
