"""Minimise over the blocks of a long run, for all affordable states beside it.

A span is some blocks that follow each other. Its least costs, for the states of the variables on its borders and of
those outside that it reads, are rows. Two spans join to a longer one: this is a product of matrices in which sums take
the place of products, and minima that of sums. So a run of any depth takes few such products.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.search.solver.exact import NO_ROWS, Minimised, Rows, join
from autopar.search.solver.parts import spread_rows


class Span:
    """Blocks that follow each other.

    Attributes:
        rows: their variables are those on the border before, on the border after, and outside, numbered in this order.
            Their least cost is zero.
        least: what was subtracted.
        count: how many blocks they are.
    """

    def __init__(self, rows: Rows, width: int, count: int = 1) -> None:
        self.width, self.count = width, count
        self.least = float(rows.costs.min()) if len(rows.costs) else 0.0
        self.rows = rows._replace(costs=rows.costs - self.least)
        self._halves: tuple[Span, Span] | None = None
        self._done: Minimised | None = None
        self._middle: list[int] = []

    @property
    def feasible(self) -> bool:
        """Whether any state is affordable."""
        return len(self.rows.costs) > 0

    def followed_by(self, other: Span, slack: float) -> Span:
        """Return both together, up to a slack above the sum of what they cost at least.

        Raises:
            TooManyRows: a table would be too large.
        """
        if not self.feasible or not other.feasible:
            return Span(NO_ROWS, self.width, self.count + other.count)
        w, total = self.width, len(self.rows.variables)
        middle = list(range(w, 2 * w))
        after = list(range(total, total + w))
        second = spread_rows(other.rows, [*middle, *after, *range(2 * w, total)])
        done = Minimised([self.rows, second], middle, slack)
        rows = join(done.rest, slack - done.constant) if done.feasible else NO_ROWS
        if len(rows.costs):
            order = [rows.variables.index(v) for v in (*range(w), *after, *range(2 * w, total))]
            rows = Rows(
                tuple(range(total)),
                rows.states[:, order],
                rows.costs + done.constant,
                tuple(rows.counts[k] for k in order),
            )
        made = Span(rows, w, self.count + other.count)
        made.least += self.least + other.least
        made._halves, made._done, made._middle = (self, other), done, middle
        return made

    def blocks(self, states: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the states of the variables of each block, from those of the span."""
        if self._halves is None or self._done is None:
            return [tuple(states)]
        w, total = self.width, len(states)
        known = {k: state for k, state in enumerate(states) if k < w or k >= 2 * w}
        known |= {total + k: states[w + k] for k in range(w)}
        self._done.complete(known)
        middle = [known[v] for v in self._middle]
        outside = states[2 * w :]
        first, second = self._halves
        return [
            *first.blocks([*states[:w], *middle, *outside]),
            *second.blocks([*middle, *states[w : 2 * w], *outside]),
        ]


def product(spans: Sequence[Span], slack: float) -> Span:
    """Return all spans together; equal stretches of them are joined once.

    Args:
        slack: above the sum of what they cost at least.

    Raises:
        TooManyRows: a table would be too large.
    """
    known: dict[tuple[int, ...], Span] = {}

    def joined(some: Sequence[Span]) -> Span:
        if len(some) == 1:
            return some[0]
        key = tuple(map(id, some))
        if key not in known:
            half = 1 << (len(some) - 1).bit_length() - 1  # the greatest power of two below
            known[key] = joined(some[:half]).followed_by(joined(some[half:]), slack)
        return known[key]

    return joined(spans)
