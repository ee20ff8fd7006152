"""Find the least cost of a factor graph, and prove a lower bound of it.

Variables of low degree are eliminated. Message passing raises a bound for the rest, on a folded graph first if there
are many equal blocks. Then the states that no assignment near the bound can have are dropped, and what is left is
solved exactly. Either it has an answer within the slack, which is then the best of all, or the bound rises by the
slack, which grows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.report.progress import doing
from autopar.search.certificate import at_most
from autopar.search.solver.elimination import Eliminated
from autopar.search.solver.exact import TooManyRows, factors_of, solve_exactly
from autopar.search.solver.factor_graph import Array, FactorGraph
from autopar.search.solver.fold import Folded, rings_of
from autopar.search.solver.message_passing import MessagePassing
from autopar.search.solver.parts import MOST_STATES
from autopar.search.solver.periodic import Best, Periodic
from autopar.search.solver.pruning import affordable, restricted
from autopar.search.solver.reduced import Reduced
from autopar.search.solver.settled import Settled

PASSES = 10  # of messages, between two looks at the bound
MOST_PASSES = 200
SLOW = 1e-4  # the relative rise of the bound over so many passes that is too little to go on
FIRST_SLACK = 1e-4  # of the bound
LEAST_SLACK = 1.0  # nanoseconds: it grows by a factor, so it begins above zero
GROWTH = 4.0
WIDER = 30.0  # how many times the slack an answer among the kept states may cost beyond the bound
PATIENCE = 20  # more rises of the bound like the last one, which would reach the best answer, are worth their passes
LEAST_RISE = 1.0  # nanoseconds


@dataclass(frozen=True)
class Answer:
    """An assignment with its cost, and a lower bound of the costs of all assignments, in nanoseconds.

    Attributes:
        settled: what solves the graph again with other costs, if it has long runs.
    """

    states: Array
    cost: float
    bound: float
    settled: Settled | None = field(default=None, repr=False, compare=False)

    @property
    def exact(self) -> bool:
        """Whether no assignment costs less."""
        return self.cost <= self.bound


def solve(
    graph: FactorGraph, order: Sequence[float], labels: Sequence[str], deadline: float = np.inf,
    settled: Settled | None = None,
) -> Answer:  # fmt: skip
    """Return the best assignment and the bound; after the deadline, the best so far.

    Args:
        order: variable → where it stands; messages are passed in this order.
        labels: variable → the path of its block, as ``layers.3``, or "" outside of blocks.
        deadline: of ``time.monotonic``.
        settled: the same graph with other costs, which is solved.
    """
    if settled is not None and (found := settled.again(graph, deadline)) is not None:
        best, bound = found
        return Answer(best.states, best.cost, bound, settled)
    rings = rings_of(graph, labels)
    if rings:
        return _solve_rings(Folded(graph, rings), order, deadline)
    reduced = Eliminated(graph)
    solver = _Solver(reduced.graph, reduced.left, order, deadline)
    with doing(lambda: gap_text(len(graph.costs), solver.cost + reduced.constant, solver.reached + reduced.constant)):
        solver.run()
    states = reduced.completed(solver.states)
    return Answer(states, graph.energy(states), solver.bound + reduced.constant)


def _solve_rings(folded: Folded, order: Sequence[float], deadline: float) -> Answer:
    """Return the best assignment and the bound of a graph with long runs."""
    graph, reduced = folded.long, Reduced(folded)
    places = [order[v] for v in folded.variables]
    passing = MessagePassing(reduced.weighted, reduced.left, places)
    best = Best(graph)

    def offer(states: Array) -> None:
        """Offer an assignment of what is left of the folded graph."""
        full = np.zeros(len(folded.variables), dtype=np.int64)
        full[passing.variables] = states
        best.offer(folded.extended(reduced.eliminated.completed(full)))

    last = -np.inf
    with doing(lambda: gap_text(len(graph.costs), best.cost, last)):
        for _ in range(MOST_PASSES // PASSES):
            passing.run(PASSES)
            offer(passing.decoded())
            rise, last = passing.bound + reduced.constant - last, passing.bound + reduced.constant
            if (
                rise * PATIENCE < best.cost - last
                or min(rise, best.cost - last) <= LEAST_RISE
                or time.monotonic() > deadline
            ):
                break
    periodic = Periodic(reduced, passing, places)
    with doing(lambda: gap_text(len(graph.costs), best.cost, periodic.bound)):
        periodic.solve(best, deadline)
    if best.cost > periodic.bound and time.monotonic() < deadline:  # many blocks may have a better answer in common
        inner = _Solver(reduced.weighted, reduced.left, places, deadline)
        inner.look(passing, _first_slack(passing), WIDER)
        offer(inner.states[passing.variables])
        periodic.solve(best, deadline)
    settled = Settled(graph, reduced, periodic, best.states)
    return Answer(best.states, best.cost, min(periodic.bound, best.cost), settled)


class _Solver:
    """Solves the variables of a graph that are left.

    Attributes:
        states: the best assignment so far, over all variables of the graph.
        cost: of these states.
        bound: the best lower bound so far.
    """

    def __init__(self, graph: FactorGraph, left: Sequence[int], order: Sequence[float], deadline: float) -> None:
        self.graph, self.left, self.order, self.deadline = graph, left, order, deadline
        self.states = np.zeros(len(graph.costs), dtype=np.int64)
        self.cost = np.inf if left else 0.0
        self.bound = self._passed = -np.inf if left else 0.0

    @property
    def reached(self) -> float:
        """The best lower bound so far, that of messages included which are still passed."""
        return max(self.bound, self._passed)

    def run(self) -> None:
        if not self.left:
            return
        passing = MessagePassing(self.graph, self.left, self.order)
        self.raise_bound(passing)
        self.bound = max(self.bound, passing.bound)
        self._prove(passing)
        if not np.isfinite(self.cost):
            self.offer(passing, passing.decoded())

    def raise_bound(self, passing: MessagePassing) -> None:
        """Pass messages until the bound hardly rises."""
        last = -np.inf
        for _ in range(MOST_PASSES // PASSES):
            passing.run(PASSES)
            self._passed = passing.bound
            if passing.bound - last < SLOW * abs(passing.bound) or time.monotonic() > self.deadline:
                return
            last = passing.bound

    def _prove(self, passing: MessagePassing) -> None:
        """Look at ever more assignments near the bound, until the best one is among them."""
        slack = _first_slack(passing)
        if not np.isfinite(self.cost):
            self.look(passing, slack, WIDER)
        while self.bound < self.cost and time.monotonic() < self.deadline:
            wanted = min(slack, self.cost - passing.bound)
            if not self.look(passing, wanted):
                return
            self.bound = max(self.bound, min(self.cost, passing.bound + wanted))
            slack *= GROWTH

    def look(self, passing: MessagePassing, slack: float, wider: float = 1.0) -> bool:
        """Look for the best assignment within ``slack`` of the bound of ``passing``, and keep it.

        Returns whether all of them were looked at: there may be too many.

        Args:
            wider: look also at assignments that cost so many times the slack, but only at those of the same states.
        """
        kept = affordable(passing, slack)
        if sum(len(states) for states in kept if len(states) > 1) > MOST_STATES:
            return False
        part = restricted(passing, kept)
        inner = Eliminated(part.graph)
        limit = passing.bound + slack * wider - part.constant - inner.constant
        full = np.zeros(len(part.graph.costs), dtype=np.int64)
        if inner.left:
            again = MessagePassing(inner.graph, inner.left, [float(v) for v in range(len(inner.graph.costs))])
            again.run(PASSES)
            if again.bound > limit:
                return True
            last = restricted(again, affordable(again, limit - again.bound))
            constant, factors = factors_of(last.graph)
            numbers = range(len(last.variables))
            try:
                solved = solve_exactly(factors, numbers, limit - last.constant - constant)
            except TooManyRows:
                return False
            if solved is None:
                return True
            for place, state in enumerate(last.expanded([solved[1][v] for v in numbers])):
                full[again.variables[place]] = state
        self.offer(passing, part.expanded(inner.completed(full)))
        return True

    def offer(self, passing: MessagePassing, found: Array) -> None:
        """Keep an assignment of the variables of ``passing`` if it is better than the best so far."""
        states = self.states.copy()
        for place, state in enumerate(found):
            states[passing.original(place)] = state
        if (cost := self._cost(states)) < self.cost:
            self.states, self.cost = states, cost

    def _cost(self, states: Array) -> float:
        total = sum(float(self.graph.costs[v][states[v]]) for v in self.left)
        for (i, j), edge in self.graph.edges.items():
            total += float(edge.table[edge.left[states[i]], edge.right[states[j]]])
        return total


def gap_text(values: int, cost: float, bound: float) -> str:
    """Say how far a search is, for the progress bar. The bound may be none yet, or below 0."""
    known = np.isfinite(cost) and 0 < bound < np.inf
    gap = f", gap {at_most(max(cost / bound - 1, 0.0))} above {bound / 1e6:,.3f} ms" if known else ""
    return f"search, {values:,} values{gap}"


def _first_slack(passing: MessagePassing) -> float:
    return max(FIRST_SLACK * abs(passing.bound), LEAST_SLACK)
