"""Minimise a part of a factor graph for all affordable states of the variables that it has in common with others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autopar.search.solver.elimination import Eliminated
from autopar.search.solver.exact import NO_ROWS, Minimised, Rows, factors_of, join, rows_of
from autopar.search.solver.factor_graph import Array
from autopar.search.solver.message_passing import MessagePassing
from autopar.search.solver.pruning import affordable, restricted

PASSES = 10  # of messages, after states were dropped
MOST_STATES = 10000  # of all variables that are solved exactly together


class TooManyStates(Exception):
    """More than ``MOST_STATES`` states are affordable."""


class Part:
    """The least cost of a part for the joint states of some variables, up to a slack above the bound of its messages.

    Attributes:
        rows: of the variables ``shared``, numbered from 0 on; their costs are those above the bound.

    Raises:
        TooManyStates, TooManyRows: the slack is too large.
    """

    def __init__(
        self, passing: MessagePassing, shared: Sequence[int], slack: float, allowed: Mapping[int, Array] | None = None
    ) -> None:
        """Find the rows.

        Args:
            shared: variables of the graph of the messages.
            allowed: for some of them, the states that count.
        """
        self._shared, self._last, self._done = [*shared], None, None
        place = {v: k for k, v in enumerate(passing.variables)}
        kept = affordable(passing, slack)
        for v, states in (allowed or {}).items():
            kept[place[v]] = np.intersect1d(kept[place[v]], states)
        self.rows = NO_ROWS
        if not all(map(len, kept)):
            return
        if sum(len(states) for states in kept if len(states) > 1) > MOST_STATES:
            raise TooManyStates
        self._part = restricted(passing, kept)
        number = {place: k for k, place in enumerate(self._part.variables)}
        mine = [number.get(place[v], -1) for v in shared]
        self._inner = inner = Eliminated(self._part.graph, kept=[v for v in mine if v >= 0])
        below = self._part.constant + inner.constant - passing.bound
        columns, costs = dict[int, Array](), np.full(1, below)
        if inner.left:
            self._again = again = MessagePassing(inner.graph, inner.left, [float(v) for v in range(len(number))])
            again.run(PASSES)
            limit = slack - below
            if again.bound > limit:
                return
            self._last = last = restricted(again, affordable(again, limit - again.bound))
            constant, factors = factors_of(last.graph)
            left = {again.variables[p]: k for k, p in enumerate(last.variables)}
            self._left = left
            found = {left[v] for v in mine if v in left}
            below += last.constant + constant
            self._done = done = Minimised(factors, [v for v in range(len(left)) if v not in found], slack - below)
            if not done.feasible:
                return
            rows = join(done.rest, slack - below - done.constant)
            costs = rows.costs + (below + done.constant)
            chosen = {v: rows.states[:, k] for k, v in enumerate(rows.variables)}
            for p, states in enumerate(last.kept):
                v = again.variables[p]
                columns[v] = states[chosen[left[v]]] if left.get(v) in chosen else states[:1]
        states = np.empty((len(costs), len(shared)), dtype=np.int32)
        for k, v in enumerate(shared):
            own = kept[place[v]]
            states[:, k] = own[0] if mine[k] < 0 else own[columns[mine[k]]]
        fits = costs <= slack
        self.rows = rows_of(tuple(range(len(shared))), states[fits], costs[fits])
        self._kept, self._mine, self._places = kept, mine, [place[v] for v in shared]

    def completed(self, states: Sequence[int]) -> Array:
        """Return the best states of all places of the messages, from those of the shared variables."""
        full = np.zeros(len(self._part.graph.costs), dtype=np.int64)
        if self._last is not None and self._done is not None:
            known: dict[int, int] = {}
            for k, v in enumerate(self._mine):
                if v in self._left:
                    within = int(np.searchsorted(self._kept[self._places[k]], states[k]))
                    known[self._left[v]] = int(np.searchsorted(self._last.kept[self._again.variables.index(v)], within))
            self._done.complete(known)
            for place, state in enumerate(self._last.expanded([known[v] for v in range(len(self._left))])):
                full[self._again.variables[place]] = state
        return self._part.expanded(self._inner.completed(full))


class _Known(NamedTuple):
    passing: MessagePassing
    slack: float
    allowed: Mapping[int, Array]
    part: Part


class KnownParts:
    """Keeps the part of each of several messages, with the largest slack so far."""

    def __init__(self, known: KnownParts | None = None) -> None:
        """Begin with the parts that others know; they do not learn those that follow."""
        self._known: dict[int, _Known] = {} if known is None else dict(known._known)  # by messages, which stay, too

    def part(self, passing: MessagePassing, shared: Sequence[int], slack: float, allowed: Mapping[int, Array]) -> Part:
        """Return a part up to a slack, or one with more slack and states; the arguments are those of ``Part``."""
        known = self._known.get(id(passing))
        if known is None or slack > known.slack or not _within(allowed, known.allowed):
            known = self._known[id(passing)] = _Known(passing, slack, allowed, Part(passing, shared, slack, allowed))
        return known.part


def _within(allowed: Mapping[int, Array], others: Mapping[int, Array]) -> bool:
    """Return whether the states that count are among those of others."""
    return all(v in allowed and bool(np.isin(allowed[v], own).all()) for v, own in others.items())


def spread_rows(rows: Rows, variables: Sequence[int]) -> Rows:
    """Return rows with other numbers of their variables; where two become one, their states must agree."""
    first: dict[int, int] = {}
    fits = np.ones(len(rows.costs), dtype=bool)
    for k, v in enumerate(variables):
        if v in first:
            fits &= rows.states[:, k] == rows.states[:, first[v]]
        first.setdefault(v, k)
    return rows_of(tuple(first), rows.states[fits][:, list(first.values())], rows.costs[fits])
