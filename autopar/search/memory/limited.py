"""Find the cheapest plan whose memory fits, and a bound, by Lagrange's multipliers.

A byte at some positions of the program gets a price, so that the cheapest plan needs less there. For all prices λ ≥ 0,

    min over plans of (cost + Σ λ·bytes) − Σ λ·limit

is a lower bound of the plans that fit. It is concave in λ, and each plan that a search finds is a plane above it: the
next price is where the least of the known planes is highest (Kelley's cutting planes, 1960). One price is raised at a
time. Each plan on the way is a candidate, and the cheapest that fits, with its transfers, is the answer.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.search.memory.claims import memory_model
from autopar.search.memory.memory import MemoryModel
from autopar.search.memory.usage import Usage, usage_of
from autopar.search.problem.ending import Ending
from autopar.search.problem.problem import Problem
from autopar.search.solver.factor_graph import Array, Edge, FactorGraph
from autopar.search.solver.message_passing import GRAIN
from autopar.search.solver.solver import Answer, solve

STEPS = 16  # prices of one position
GROWN = 6  # of them, as long as no plan is within the limit
POSITIONS = 8  # times that a position is chosen
FIRST_PRICE = 2.0**-4  # of all bytes of the limit, relative to the cost
FASTER = 16.0  # a price that is too low grows so many times
TOLERANCE = 1.0  # nanoseconds


class NothingFits(Exception):
    """No plan was found that fits; ``usage`` is that of the smallest one."""

    def __init__(self, usage: Usage) -> None:
        super().__init__(usage)
        self.usage = usage


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan.

    Attributes:
        cost: by the factor graph.
        price: of the explicit step.
        held: the bytes that the model counts at each position.
        usage: the peak, with transfers.
    """

    states: Array
    cost: float
    price: int
    held: Array
    usage: Usage


def within(
    problem: Problem, ending: Ending | None, first: Answer, limit: float, room: float, deadline: float
) -> tuple[Answer, Usage]:
    """Return the cheapest plan that fits, with a bound of all that fit, and its peak.

    Args:
        first: the cheapest plan of all, which does not fit.
        limit: bytes of a rank.
        room: how many of them plans may use by the estimate: less than the limit where estimates were too low.
        deadline: of ``time.monotonic``.

    Raises:
        NothingFits: there is none among those that were looked at.
    """
    if problem.late:
        raise NothingFits(usage_of(problem, first.states.tolist(), ending))
    return Limited(problem, ending, memory_model(problem, ending), limit, room, deadline).run(first)


@dataclass
class Limited:
    """The search of one problem within a limit; ``within`` has the arguments.

    Attributes:
        bound: the best lower bound so far of the costs of plans that fit.
    """

    problem: Problem
    ending: Ending | None
    model: MemoryModel
    limit: float
    room: float
    deadline: float
    candidates: list[Candidate] = field(default_factory=list)
    bound: float = -np.inf

    def run(self, first: Answer) -> tuple[Answer, Usage]:
        """Return the cheapest plan that fits, given the cheapest of all.

        Raises:
            NothingFits: there is none among those that were looked at.
        """
        self.bound = first.bound
        latest = self._add(first.states)
        weights: dict[int, float] = {}
        position, room = int(latest.held.argmax()), max(self.room, 1.0)
        for _ in range(POSITIONS):
            # what transfers take beside the model counts too
            target = min(room, self.limit)
            raised = self._raise(weights, position, target)
            if raised is None:
                break
            weights[position], latest = raised
            if self.fits(latest) or time.monotonic() > self.deadline:
                break
            over = int(latest.held.argmax())
            if latest.held[over] > target:
                position = over
            else:
                room = target - (latest.usage.bytes - self.room)
        if self.best is None:
            self._squeeze(weights or {position: 0.0})
        if self.best is None:
            allowed = [c for c in self.candidates if c.cost < self.problem.chains.impossible] or self.candidates
            raise NothingFits(min((c.usage for c in allowed), key=lambda usage: usage.bytes))
        self._mix(weights)
        best = self.best
        return Answer(best.states, best.cost, min(self.bound, best.price / self.problem.microbatches)), best.usage

    def fits(self, candidate: Candidate) -> bool:
        """Return whether a candidate fits, and does nothing that is forbidden."""
        return candidate.usage.bytes <= self.room and candidate.cost < self.problem.chains.impossible

    @property
    def best(self) -> Candidate | None:
        """The cheapest candidate that fits."""
        return min((c for c in self.candidates if self.fits(c)), key=lambda c: c.price, default=None)

    # -- prices ------------------------------------------------------------------------------------------------------

    def _raise(self, weights: Mapping[int, float], position: int, target: float) -> tuple[float, Candidate] | None:
        """Return the best price of one position, the others being given, and a candidate within the target there.

        ``None`` if the search finds none, whatever the price is.
        """
        others = {other: weight for other, weight in weights.items() if other != position}
        price = FIRST_PRICE * max(self._cost(self.candidates[0], others), 1.0) / target
        top = price * FASTER**GROWN
        for _ in range(STEPS):
            planes = [(self._cost(c, others), c.held[position] - target) for c in self.candidates]
            if any(slope <= 0 for _, slope in planes):
                price, value = _highest(planes)
                if value == -np.inf:
                    break
            else:
                value = np.inf
            found = self._solved({**others, position: price})
            if found.held[position] > target and value == np.inf:
                if price >= top:
                    return None
                price *= FASTER
            elif self._cost(found, others) + price * (found.held[position] - target) >= value - TOLERANCE:
                break
            if time.monotonic() > self.deadline:
                break
        within = [c for c in self.candidates if c.held[position] <= target]
        if not within:
            return None
        return price, min(within, key=lambda c: self._cost(c, others) + price * c.held[position])

    def _cost(self, candidate: Candidate, weights: Mapping[int, float]) -> float:
        return candidate.cost + sum(weight * candidate.held[position] for position, weight in weights.items())

    def _solved(self, weights: Mapping[int, float]) -> Candidate:
        """Return the cheapest plan at these prices, and raise the bound."""
        graph, scale = self._scaled(weights)
        priced = self.model.weighted(graph, {position: weight * scale for position, weight in weights.items()})
        answer = solve(priced, self.problem.order, self.problem.labels, self.deadline)
        least = answer.bound / scale - sum(weights.values()) * self.limit
        self.bound = max(self.bound, least)
        return self._add(answer.states)

    def _add(self, states: Array) -> Candidate:
        known = next((c for c in self.candidates if (c.states == states).all()), None)
        if known is None:
            chosen = states.tolist()
            usage = usage_of(self.problem, chosen, self.ending)
            price, cost = self.problem.explicit_price(chosen), self.problem.graph.energy(states)
            known = Candidate(states, cost, price, self.model.held(states), usage)
            self.candidates.append(known)
        return known

    def _scaled(self, weights: Mapping[int, float]) -> tuple[FactorGraph, float]:
        """Return a graph of lower costs where bytes would cost more than what is forbidden, and the factor."""
        graph, forbidden = self.problem.graph, float(self.problem.chains.impossible)
        dearest = sum(weights.values()) * max(candidate.held.max() for candidate in self.candidates)
        scale = 1.0
        while dearest * scale > forbidden / 8:
            scale /= 2
        if scale == 1.0:
            return graph, scale
        known: dict[int, Array] = {}

        def lower(array: Array) -> Array:
            if id(array) not in known:
                low = np.floor(array * (scale * GRAIN)) / GRAIN
                known[id(array)] = graph.intern(np.where(array < forbidden / 2, low, array))
            return known[id(array)]

        edges = {pair: Edge(edge.left, edge.right, lower(edge.table)) for pair, edge in graph.edges.items()}
        return FactorGraph(graph.intern, [lower(costs) for costs in graph.costs], graph.names, edges), scale

    def _squeeze(self, weights: Mapping[int, float]) -> None:
        """Look for plans that need as little memory as possible."""
        positions = dict.fromkeys(weights)
        price = FASTER**GROWN * FIRST_PRICE * max(self.candidates[0].cost, 1.0) / self.limit
        for _ in range(POSITIONS):
            found = self._solved({position: price / len(positions) for position in positions})
            over = [p for p in (int(found.held.argmax()), found.usage.position) if p not in positions]
            if self.fits(found) or not over or time.monotonic() > self.deadline:
                return
            positions[over[0]] = None

    # -- mixtures ----------------------------------------------------------------------------------------------------

    def _mix(self, weights: Mapping[int, float]) -> None:
        """Mix the best candidate with one that needs a little more: blocks one by one, as far as it fits.

        At one price, all equal blocks of a model take the same layouts.
        """
        best = self.best
        assert best is not None
        above = [c for c in self.candidates if not self.fits(c) and c.price < best.price]
        if not above or not weights:
            return
        other = min(above, key=lambda c: c.usage.bytes)
        pairs = [np.unique([a, b]) for a, b in zip(best.states, other.states, strict=True)]
        blocks: dict[str, list[int]] = {}
        for variable, label in enumerate(self.problem.labels):
            if len(pairs[variable]) > 1:
                blocks.setdefault(label or self.problem.graph.names[variable], []).append(variable)
        order = sorted(blocks.values(), key=lambda own: self.problem.order[own[0]])
        low, high = 0, len(order)  # so many blocks pay for their bytes
        dear = {position: weight * FASTER for position, weight in weights.items()}
        while high - low > 1 and time.monotonic() < self.deadline:
            middle = (low + high) // 2
            paying = {variable for own in order[:middle] for variable in own}
            found = self._add(self._solved_among(pairs, self.model.weighted(self.problem.graph, dear, paying)))
            if self.fits(found):
                high = middle
            else:
                low = middle

    def _solved_among(self, kept: Sequence[Array], graph: FactorGraph) -> Array:
        """Return the best assignment with these states."""
        small = FactorGraph(graph.intern)
        for costs, name, states in zip(graph.costs, graph.names, kept, strict=True):
            small.add_variable(name, costs[states])
        for (i, j), edge in graph.edges.items():
            small.add_edge(i, j, edge.left[kept[i]], edge.right[kept[j]], edge.table)
        answer = solve(small, self.problem.order, [""] * len(kept), self.deadline)
        return np.array([states[state] for states, state in zip(kept, answer.states, strict=True)])


def _highest(planes: Collection[tuple[float, float]]) -> tuple[float, float]:
    """Return the λ ≥ 0 at which the least of ``cost + λ·slope`` is highest, and that value."""
    costs, slopes = (np.array(column) for column in zip(*planes, strict=True))
    prices = [0.0]
    for cost, slope in planes:
        if slope > 0:
            falling = slopes <= 0
            prices += [p for p in ((costs[falling] - cost) / (slope - slopes[falling])).tolist() if p > 0]
    values = [float((costs + price * slopes).min()) for price in prices]
    best = int(np.argmax(values))
    return prices[best], values[best]
