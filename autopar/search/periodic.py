"""Minimise a graph with long runs of equal blocks exactly, in parts: the blocks of each ring, and what is outside.

The parts have only the variables on the borders of blocks and the outer ones that blocks read in common. For each part,
its least cost is found for all their states that an answer within the slack can have. Then the blocks are joined to
spans, and the spans of all runs with what is outside.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from autopar.search.exact import Minimised, TooManyRows, join
from autopar.search.factor_graph import Array, FactorGraph
from autopar.search.fold import Folded
from autopar.search.message_passing import MessagePassing
from autopar.search.parts import Part, TooManyStates, spread_rows
from autopar.search.spans import Span
from autopar.search.tied import Ends, Reduced, TiedRing, settle, shares

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
        """Split the graph, with the messages of the weighted graph."""
        self.reduced, self.folded = reduced, reduced.folded
        given = shares(passing, reduced)
        self.rings = [TiedRing(reduced, ring, given, order) for ring in self.folded.rings]
        self.ends = Ends(reduced, self.rings, given, order)
        settle(self.ends.passing)
        self.pieces = [ring.pieces() for ring in self.rings]
        self.bound = self._parts_bound = self.ends.passing.bound + reduced.constant + sum(
            ring.ring.times * piece.passing.bound
            for ring, pieces in zip(self.rings, self.pieces, strict=True)
            for piece in pieces
        )

    def solve(self, best: Best, deadline: float) -> None:
        """Look at ever more assignments near the bound, until the best one is among them.

        Args:
            deadline: of ``time.monotonic``.
        """
        slack = max(FIRST_SLACK * abs(self.bound), LEAST_SLACK)
        while self.bound < best.cost and time.monotonic() < deadline:
            wanted = min(slack, best.cost - self._parts_bound)
            try:
                found = self._look(wanted)
            except (TooManyRows, TooManyStates):
                return
            if found is not None:
                best.offer(found)
            self.bound = max(self.bound, min(best.cost, self._parts_bound + wanted))
            slack *= GROWTH

    def _look(self, slack: float) -> Array | None:
        """Return the best assignment within a slack above the sum of the bounds of the parts."""
        pieces = [piece for pieces in self.pieces for piece in pieces]
        outer = sorted({v for piece in pieces for v in piece.outside})
        shared = [v for borders in self.ends.borders for border in borders for v in border]
        ends = Part(self.ends.passing, [*shared, *(self.ends.own[v] for v in outer)], slack)
        if not len(ends.rows.costs):
            return None
        left = slack - float(ends.rows.costs.min())
        allowed = {v: np.unique(ends.rows.states[:, len(shared) + k]) for k, v in enumerate(outer)}
        parts: list[list[Part]] = []
        outsides: list[list[int]] = []
        for ring, found in zip(self.rings, self.pieces, strict=True):
            outside = sorted({v for piece in found for v in piece.outside})
            outsides.append(outside)
            parts.append([])
            for piece in found:
                names = [v for v in outside if v in piece.outside]
                domain = {own: allowed[v] for v, own in piece.outside.items()}
                shared_here = [*piece.before, *piece.after, *(piece.outside[v] for v in names)]
                part = Part(piece.passing, shared_here, left, domain)
                if not len(part.rows.costs):
                    return None
                left -= (ring.ring.times) * float(part.rows.costs.min())
                parts[-1].append(part)
            if left < 0:
                return None
        return self._joined(ends, parts, slack, left, outer, outsides)

    def _joined(self, ends: Part, parts, slack: float, left: float, outer, outsides) -> Array | None:
        base = float(ends.rows.costs.min())
        factors, spans = [ends.rows], []
        begin, count = 0, sum(len(border) for borders in self.ends.borders for border in borders)
        for ring, found, outside, borders in zip(self.rings, parts, outsides, self.ends.borders, strict=True):
            width = len(borders[0])
            blocks = [Span(part.rows, width) for part in found]
            span = blocks[0]
            for block in blocks[1:]:
                span = span.followed_by(block, left)
            if not span.feasible:
                return None
            once = span.least - sum(block.least for block in blocks)
            left -= once * ring.ring.times
            whole = _power(span, ring.ring.times, left) if left >= 0 else None
            if whole is None or not whole.feasible:
                return None
            left -= whole.least - span.least * ring.ring.times
            base += whole.least
            spans.append(whole)
            names = [*range(begin, begin + 2 * width), *(count + outer.index(v) for v in outside)]
            factors.append(spread_rows(whole.rows, names))
            begin += 2 * width
        done = Minimised(factors, range(len(ends.rows.variables)), slack - base + float(ends.rows.costs.min()))
        if not done.feasible:
            return None
        known: dict[int, int] = {}
        done.complete(known)
        return self._completed(ends, parts, spans, known, outer, outsides)

    def _completed(self, ends: Part, parts, spans: list[Span], known: dict[int, int], outer, outsides) -> Array:
        reduced = self.reduced
        short = np.zeros(len(reduced.graph.costs), dtype=np.int64)
        of_ends = ends.completed([known[k] for k in range(len(known))])
        places = {v: k for k, v in enumerate(self.ends.passing.variables)}
        for v, own in self.ends.own.items():
            short[v] = of_ends[places[own]]
        begin, count = 0, sum(len(border) for borders in self.ends.borders for border in borders)
        copies: list[list[Array]] = []
        for ring, pieces, found, span, outside in zip(self.rings, self.pieces, parts, spans, outsides, strict=True):
            width = span.width
            names = [*range(begin, begin + 2 * width), *(count + outer.index(v) for v in outside)]
            begin += 2 * width
            known_blocks: dict[object, Array] = {}
            copies.append([])
            for k, states in enumerate(span.blocks([known[v] for v in names])):
                k %= len(pieces)
                if (k, states) not in known_blocks:
                    inner = found[k].completed(states)
                    full = short.copy()
                    for place, state in zip(pieces[k].passing.variables, inner, strict=True):
                        v = pieces[k].own[place] if place < len(pieces[k].own) else None
                        if v is not None:
                            full[v] = state
                    known_blocks[k, states] = reduced.eliminated.completed(full)
                copies[-1].append(known_blocks[k, states])
        whole = reduced.eliminated.completed(short)
        states = self.folded.extended(whole)
        for ring, blocks in zip(self.rings, copies, strict=True):
            for block, full in zip(ring.ring.blocks, blocks, strict=True):
                for v in block:
                    states[v] = full[self.folded.number[v]]
        return states


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
