"""Minimise a graph with long runs of equal blocks exactly, in parts: the blocks of each ring, and what is outside.

The parts have only the variables on the borders of blocks and the outer ones that blocks read in common. For each part,
its least cost is found for all their states that an answer within the slack can have. Then the blocks are joined to
spans, and the spans of all runs with what is outside.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autopar.search.solver.exact import Minimised, Rows, TooManyRows
from autopar.search.solver.factor_graph import Array, FactorGraph
from autopar.search.solver.message_passing import MessagePassing
from autopar.search.solver.parts import KnownParts, Part, TooManyStates, spread_rows
from autopar.search.solver.reduced import Reduced
from autopar.search.solver.spans import Span, product
from autopar.search.solver.tied import PASSES, Ends, Piece, TiedRing, settle, shares

FIRST_SLACK = 2e-5  # of the bound
LEAST_SLACK = 1.0  # nanoseconds
GROWTH = 3.0
NEAR = 5.0  # up to so many slacks above the bound, the best answer is looked at once


class Best:
    """The best assignment of a graph so far.

    Attributes:
        states: of all variables.
        cost: of these states.
    """

    def __init__(self, graph: FactorGraph, states: Array | None = None) -> None:
        self._graph = graph
        self.states = np.zeros(len(graph.costs), dtype=np.int64) if states is None else states
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
        self._given, self._order = shares(passing, reduced), order
        rings = [TiedRing(reduced, ring, self._given, order) for ring in reduced.folded.rings]
        ends = Ends(reduced, rings, self._given, order)
        settle(ends.passing)
        self._parts = KnownParts()
        self._looked = 0.0
        self._compose(reduced, rings, ends, [ring.pieces() for ring in rings], {})

    def again(self, reduced: Reduced, others: Mapping[tuple[int, int], Reduced]) -> Periodic | None:
        """Return the parts of a graph with other costs, which begin with the messages of these.

        ``None`` if they cannot.

        Args:
            reduced: the graph; it is alike.
            others: number of a ring and of one of its blocks → the graph in which all such blocks of the ring have the
                costs of this one.
        """
        made = copy.copy(self)
        made._parts = KnownParts(self._parts)
        rings, pieces = [], []
        for ring, own in zip(self._rings, self._pieces, strict=True):
            if not self._reduced.same(reduced, ring.own):
                ring = TiedRing(reduced, ring.ring, self._given, self._order, ring, passes=0)
                settle(ring.passing)
                own = ring.pieces(1)
            rings.append(ring)
            pieces.append(own)
        ends = self._ends
        if rings != self._rings or not self._reduced.same(reduced, ends.own):
            ends = Ends(reduced, rings, self._given, self._order, ends)
            ends.passing.run(PASSES)
        different: dict[tuple[int, int, int], Piece] = {}
        blocks: dict[tuple[int, int], _Block] = {}
        for (r, k), other in others.items():
            which = k % rings[r].ring.period
            key = r, which, id(other)
            if key not in different:
                ring = TiedRing(other, rings[r].ring, self._given, self._order, rings[r], passes=0)
                if any((costs != rings[r].to_outside[v]).any() for v, costs in ring.to_outside.items()):
                    return None
                different[key] = ring.piece(which, 0)
                settle(different[key].passing)
            blocks[r, k] = _Block(different[key], other)
        made._compose(reduced, rings, ends, pieces, blocks)
        made._slack = max(self._looked, LEAST_SLACK)
        return made

    def _compose(
        self, reduced: Reduced, rings: list[TiedRing], ends: Ends, pieces: list[list[Piece]],
        others: Mapping[tuple[int, int], _Block],
    ) -> None:  # fmt: skip
        """Take the parts. ``others``: number of a ring and of one of its blocks → the block, if it differs."""
        self._reduced, self._folded = reduced, reduced.folded
        self._rings, self._ends, self._pieces, self._others = rings, ends, pieces, others
        self._place_columns()
        total = ends.passing.bound + reduced.constant
        for r, (ring, own) in enumerate(zip(rings, pieces, strict=True)):
            total += sum(times * piece.passing.bound for times, piece in zip(self._times(r), own, strict=True))
            total += sum(
                block.piece.passing.bound + (block.reduced.constant - reduced.constant) / ring.ring.times
                for (which, _), block in others.items()
                if which == r
            )
        self.bound = self._sum = total
        self._slack = max(FIRST_SLACK * abs(self.bound), LEAST_SLACK)

    def _times(self, r: int) -> list[int]:
        """Return how often each block of a ring stands in its run."""
        ring = self._rings[r].ring
        different = [k % ring.period for which, k in self._others if which == r]
        return [ring.times - different.count(k) for k in range(ring.period)]

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
        near = NEAR
        while self.bound < best.cost and time.monotonic() < deadline:
            above = best.cost - self._sum
            wanted = self._looked = above if above <= near * self._slack else self._slack
            try:
                found = self._look(wanted)
            except (TooManyRows, TooManyStates):
                if wanted <= self._slack:
                    return
                near = 1.0
                continue
            if found is not None:
                best.offer(found)
            self.bound = max(self.bound, min(best.cost, self._sum + wanted))
            self._slack *= GROWTH

    def _look(self, slack: float) -> Array | None:
        """Return the best assignment within a slack above the sum of the bounds of the parts."""
        ends = self._parts.part(self._ends.passing, self._shared, slack, {})
        if not len(ends.rows.costs):
            return None
        left = slack - float(ends.rows.costs.min())
        allowed = {v: np.unique(ends.rows.states[:, column]) for v, column in self._outer.items()}
        parts: list[list[Part]] = [[] for _ in self._rings]
        others: dict[tuple[int, int], Part] = {}
        for r, pieces in enumerate(self._pieces):
            for times, piece in zip(self._times(r), pieces, strict=True):
                parts[r].append(self._of_piece(piece, left, allowed))
                left -= times * _least(parts[r][-1]) if times else 0.0
                if left < 0:
                    return None
        for key, block in self._others.items():
            others[key] = self._of_piece(block.piece, left, allowed)
            left -= _least(others[key])
            if left < 0:
                return None
        factors, spans = [ends.rows], []
        for r, columns in enumerate(self._columns):
            span, paid = self._span(r, parts[r], others, left)
            if span is None:
                return None
            left -= span.least - paid
            spans.append(span)
            factors.append(spread_rows(span.rows, columns))
        done = Minimised(factors, range(len(self._shared)), slack - sum(span.least for span in spans))
        if not done.feasible:
            return None
        known: dict[int, int] = {}
        done.complete(known)
        return self._completed(ends, parts, others, spans, known)

    def _of_piece(self, piece: Piece, slack: float, allowed: Mapping[int, Array]) -> Part:
        domain = {own: allowed[v] for v, own in piece.outside.items()}
        shared = [*piece.before, *piece.after, *(piece.outside[v] for v in sorted(piece.outside))]
        return self._parts.part(piece.passing, shared, slack, domain)

    def _span(
        self, r: int, parts: Sequence[Part], others: Mapping[tuple[int, int], Part], slack: float
    ) -> tuple[Span | None, float]:
        """Return the span of a run, and what its blocks cost at least, each for itself."""
        ring, times = self._rings[r], self._times(r)
        paid = sum(count * _least(part) for count, part in zip(times, parts, strict=True) if count)
        if not any(which == r for which, _ in others):
            return _whole(ring, [part.rows for part in parts], slack), paid
        width = len(ring.border.lower) + len(ring.border.upper)
        spans: dict[int, Span] = {}
        row = []
        for k in range(len(ring.ring.blocks)):
            part = others.get((r, k), parts[k % ring.ring.period])
            row.append(spans.setdefault(id(part), Span(part.rows, width)))
        paid += sum(_least(part) for (which, _), part in others.items() if which == r)
        whole = product(row, slack)
        return (whole if whole.feasible else None), paid

    def _completed(
        self, ends: Part, parts: Sequence[Sequence[Part]], others: Mapping[tuple[int, int], Part],
        spans: Sequence[Span], known: Mapping[int, int],
    ) -> Array:  # fmt: skip
        """Return the states of the long graph from those that the parts have in common."""
        reduced, number = self._reduced, self._folded.number
        short = np.zeros(len(reduced.graph.costs), dtype=np.int64)
        for v, state in _assigned(
            ends, self._ends.passing, list(self._ends.own), [known[k] for k in range(len(known))]
        ):
            short[v] = state
        states = self._folded.extended(reduced.eliminated.completed(short))
        for r, (ring, pieces, span, columns) in enumerate(
            zip(self._rings, self._pieces, spans, self._columns, strict=True)
        ):
            made: dict[object, Array] = {}
            for k, beside in enumerate(span.blocks([known[column] for column in columns])):
                which = k % len(pieces)
                block = self._others.get((r, k), _Block(pieces[which], reduced))
                part = others.get((r, k), parts[r][which])
                if (id(part), beside) not in made:
                    full = short.copy()
                    for v, state in _assigned(part, block.piece.passing, block.piece.own, beside):
                        full[v] = state
                    made[id(part), beside] = block.reduced.eliminated.completed(full)
                for v in ring.ring.blocks[k]:
                    states[v] = made[id(part), beside][number[v]]
        return states


class _Block(NamedTuple):
    """A block of a run, in the graph whose blocks have its costs."""

    piece: Piece
    reduced: Reduced


def _least(part: Part) -> float:
    """Return the least cost of a part above its bound; infinite if it has no rows."""
    return float(part.rows.costs.min(initial=np.inf))


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
