"""Minimise a graph with long runs of equal blocks exactly, in parts: the blocks of each ring, and what is outside.

The parts have only the variables on the borders of blocks and the outer ones that blocks read in common. For each part,
its least cost is found for all their states that an answer within the slack can have. Then the blocks are joined to
spans, and the spans of all runs with what is outside.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autopar.search.solver.exact import Minimised, Rows, TooManyRows
from autopar.search.solver.factor_graph import Array, FactorGraph
from autopar.search.solver.message_passing import MessagePassing
from autopar.search.solver.parts import Part, TooManyStates, spread_rows
from autopar.search.solver.spans import Span
from autopar.search.solver.tied import Ends, Reduced, TiedRing, settle, shares

FIRST_SLACK = 2e-5  # of the bound
LEAST_SLACK = 1.0  # nanoseconds
GROWTH = 3.0


class Best:
    """The best assignment of a graph so far.

    Attributes:
        states: of all variables.
        cost: of these states.
    """

    def __init__(self, graph: FactorGraph) -> None:
        self._graph = graph
        self.states = np.zeros(len(graph.costs), dtype=np.int64)
        self.cost = graph.energy(self.states)

    def offer(self, states: Array) -> None:
        """Keep an assignment if it is better."""
        if (cost := self._graph.energy(states)) < self.cost:
            self.states, self.cost = states, cost


class Periodic:
    """The parts of a graph, with a bound.

    Attributes:
        bound: the best lower bound so far.
    """

    def __init__(self, reduced: Reduced, passing: MessagePassing, order: Sequence[float]) -> None:
        """Split the graph.

        Args:
            passing: messages of the weighted graph.
            order: variable of the folded graph → where it stands.
        """
        self._reduced, self._folded = reduced, reduced.folded
        given = shares(passing, reduced)
        self._rings = [TiedRing(reduced, ring, given, order) for ring in self._folded.rings]
        self._ends = Ends(reduced, self._rings, given, order)
        settle(self._ends.passing)
        self._pieces = [ring.pieces() for ring in self._rings]
        self._place_columns()
        self.bound = self._sum = self._ends.passing.bound + reduced.constant + sum(
            ring.ring.times * piece.passing.bound
            for ring, pieces in zip(self._rings, self._pieces, strict=True)
            for piece in pieces
        )  # fmt: skip
        self._slack = max(FIRST_SLACK * abs(self.bound), LEAST_SLACK)

    def _place_columns(self) -> None:
        """Number what the parts have in common: the borders of each run, then the outer variables that blocks read."""
        borders = [v for both in self._ends.borders for border in both for v in border]
        outside = [sorted({v for piece in pieces for v in piece.outside}) for pieces in self._pieces]
        outer = sorted({v for each in outside for v in each})
        self._shared = [*borders, *(self._ends.own[v] for v in outer)]
        self._outer = {v: len(borders) + k for k, v in enumerate(outer)}
        self._columns: list[list[int]] = []  # of each run
        begin = 0
        for (before, after), names in zip(self._ends.borders, outside, strict=True):
            end = begin + len(before) + len(after)
            self._columns.append([*range(begin, end), *(self._outer[v] for v in names)])
            begin = end

    def solve(self, best: Best, deadline: float) -> None:
        """Look at ever more assignments near the bound, until the best one is among them.

        Args:
            deadline: of ``time.monotonic``.
        """
        while self.bound < best.cost and time.monotonic() < deadline:
            wanted = min(self._slack, best.cost - self._sum)
            try:
                found = self._look(wanted)
            except (TooManyRows, TooManyStates):
                return
            if found is not None:
                best.offer(found)
            self.bound = max(self.bound, min(best.cost, self._sum + wanted))
            self._slack *= GROWTH

    def _look(self, slack: float) -> Array | None:
        """Return the best assignment within a slack above the sum of the bounds of the parts."""
        ends = Part(self._ends.passing, self._shared, slack)
        if not len(ends.rows.costs):
            return None
        left = slack - float(ends.rows.costs.min())
        allowed = {v: np.unique(ends.rows.states[:, column]) for v, column in self._outer.items()}
        parts: list[list[Part]] = []
        for ring, pieces in zip(self._rings, self._pieces, strict=True):
            parts.append([])
            for piece in pieces:
                domain = {own: allowed[v] for v, own in piece.outside.items()}
                part = Part(
                    piece.passing,
                    [*piece.before, *piece.after, *(piece.outside[v] for v in sorted(piece.outside))],
                    left,
                    domain,
                )
                parts[-1].append(part)
                if not len(part.rows.costs):
                    return None
                left -= ring.ring.times * float(part.rows.costs.min())
                if left < 0:
                    return None
        factors, spans = [ends.rows], []
        for ring, columns, own in zip(self._rings, self._columns, parts, strict=True):
            span = _whole(ring, [part.rows for part in own], left)
            if span is None:
                return None
            left -= span.least - ring.ring.times * sum(float(part.rows.costs.min()) for part in own)
            spans.append(span)
            factors.append(spread_rows(span.rows, columns))
        done = Minimised(factors, range(len(self._shared)), slack - sum(span.least for span in spans))
        if not done.feasible:
            return None
        known: dict[int, int] = {}
        done.complete(known)
        return self._completed(ends, parts, spans, known)

    def _completed(
        self, ends: Part, parts: Sequence[Sequence[Part]], spans: Sequence[Span], known: Mapping[int, int]
    ) -> Array:
        """Return the states of the long graph from those that the parts have in common."""
        reduced, number = self._reduced, self._folded.number
        short = np.zeros(len(reduced.graph.costs), dtype=np.int64)
        for v, state in _assigned(
            ends, self._ends.passing, list(self._ends.own), [known[k] for k in range(len(known))]
        ):
            short[v] = state
        states = self._folded.extended(reduced.eliminated.completed(short))
        for ring, pieces, own, span, columns in zip(
            self._rings, self._pieces, parts, spans, self._columns, strict=True
        ):
            made: dict[object, Array] = {}
            for k, beside in enumerate(span.blocks([known[column] for column in columns])):
                which = k % len(pieces)
                if (which, beside) not in made:
                    full = short.copy()
                    for v, state in _assigned(own[which], pieces[which].passing, pieces[which].own, beside):
                        full[v] = state
                    made[which, beside] = reduced.eliminated.completed(full)
                for v in ring.ring.blocks[k]:
                    states[v] = made[which, beside][number[v]]
        return states


def _assigned(
    part: Part, passing: MessagePassing, names: Sequence[int], shared: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield the best state of each of the first variables of a part, by their names."""
    states = part.completed(shared)
    for place, v in enumerate(passing.variables):
        if v < len(names):
            yield names[v], int(states[place])


def _whole(ring: TiedRing, blocks: Sequence[Rows], slack: float) -> Span | None:
    """Return the span of a whole run; ``None`` if all costs more than the slack above the sum of the least costs."""
    width = len(ring.border.lower) + len(ring.border.upper)
    once, *others = (Span(rows, width) for rows in blocks)
    least = once.least
    for other in others:
        once, least = once.followed_by(other, slack), least + other.least
        if not once.feasible:
            return None
    slack -= (once.least - least) * ring.ring.times
    whole = _power(once, ring.ring.times, slack) if slack >= 0 else None
    return whole if whole is not None and whole.feasible else None


def _power(span: Span, times: int, slack: float) -> Span | None:
    """Return so many spans that follow each other; ``None`` if all cost more than the slack above their bounds."""
    result: Span | None = None
    while True:
        if times & 1:
            before = span.least if result is None else result.least + span.least
            result = span if result is None else result.followed_by(span, slack)
            slack -= result.least - before
        times >>= 1
        if not times or slack < 0:
            return result if slack >= 0 else None
        twice = span.followed_by(span, slack)
        slack -= (twice.least - 2 * span.least) * times
        span = twice
        if not span.feasible:
            return None
