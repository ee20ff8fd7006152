"""Search the shortest path between two states of an even value.

It goes forwards from the value (A*), backwards from the goal, and over one redistribute in between. Bytes that a rank,
or a node, lacks bound what a path still costs.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence

from autopar.transitions.rooms import Move, State
from autopar.transitions.states import Edge, Moves

Path = tuple[tuple[Move, State], ...]  # each move with the state that follows
Key = tuple[int, int, int]  # nanoseconds, transfers, redistributes: the least is best
SLACK = 16  # nanoseconds that rounding may add to a bound
MOST = 1024  # states from which a search goes on; on a mesh of three axes it ends before


class Search:
    """The shortest path from one state to another.

    Attributes:
        best: the key of the best path so far; a path is found only if it is better.
        prices: of the transfers of the path.
    """

    def __init__(self, moves: Moves, best: Key) -> None:
        self.moves, self.best = moves, best
        self._to_goal: dict[State, int] = {}
        self._from_start: dict[State, int] = {}
        self._least = round(moves.prices.latencies[0])  # nanoseconds of an exchange
        self.prices: tuple[int, ...] = ()

    def run(self) -> Path | None:
        """Return the path, unless it is no better than ``best``."""
        start, goal, moves = self.moves.start, self.moves.goal, self.moves
        shortest = _Costs(start)
        end: tuple[State, State] | None = None  # ends of a redistribute on the best path
        direct = False
        for here in shortest.grow(moves.after, self.to_goal, self):
            cost = shortest.paid[here]
            if here == goal:
                if (*cost, 0) < self.best:
                    self.best, direct, end = (*cost, 0), True, None
            elif here[2:] == goal[2:] and (
                cost[0] + self._least_exchange(here, goal) < self.best[0] and moves.exchanges(here, goal)
            ):
                key = cost[0] + moves.exchange(here, goal), cost[1] + 1, 1
                if key < self.best:
                    self.best, direct, end = key, True, (here, goal)
        backwards = _Costs(goal)
        for _ in backwards.grow(moves.before, self.from_start, self):
            pass
        alike: dict[tuple[int, bool], list[tuple[tuple[int, int], float, State]]] = {}
        near, counts, elements = moves.prices.rates[0], moves.prices.counts, moves.elements
        for state, paid in sorted(shortest.paid.items(), key=_paid):
            if paid[0] + self.to_goal(state) < self.best[0]:
                alike.setdefault(state[2:], []).append((paid, elements / counts[state[1]], state))
        for there, left in sorted(backwards.paid.items(), key=_paid):
            if there == goal or left[0] + self.from_start(there) >= self.best[0]:
                continue
            wanted, rate = elements / counts[there[1]], near * moves.itemsizes[there[3]]
            for paid, held, here in alike.get(there[2:], ()):
                both = paid[0] + left[0]
                if both + self._least >= self.best[0]:
                    break
                if both + (wanted - held) * rate >= self.best[0]:
                    continue
                if both + self._least_exchange(here, there) < self.best[0] and moves.exchanges(here, there):
                    key = both + moves.exchange(here, there), paid[1] + left[1] + 1, 1
                    if key < self.best:
                        self.best, direct, end = key, True, (here, there)
        if not direct:
            return None
        if end is None:
            self.prices = shortest.prices(goal)
            return shortest.path(goal)
        here, there = end
        after = backwards.prices(there)[::-1]
        self.prices = (*shortest.prices(here), self.best[0] - shortest.paid[here][0] - sum(after), *after)
        return (*shortest.path(here), (("redistribute", 0, 0, 0), there), *backwards.path(there, backwards=True))

    def to_goal(self, state: State) -> int:
        """Return nanoseconds that no path from a state to the goal is faster than."""
        found = self._to_goal.get(state)
        if found is None:
            found = self._to_goal[state] = self._bound(state, self.moves.goal)
        return found

    def from_start(self, state: State) -> int:
        """Return nanoseconds that no path with an exchange from the start to a state is faster than."""
        found = self._from_start.get(state)
        if found is None:
            found = self._from_start[state] = max(self._least, self._bound(self.moves.start, state))
        return found

    def _bound(self, here: State, there: State) -> int:
        """Axes that are pending at both ends may stay so, or be reduced and become pending again."""
        kept = here[2] & there[2]
        reduced, new = here[2] & ~kept, there[2] & ~kept
        bound = self._bound_of(here, there, reduced, new)
        again = kept & self.moves.reduced & self.moves.renewed
        some = again
        while some and bound:
            bound = min(bound, self._bound_of(here, there, reduced | some, new | some))
            some = (some - 1) & again
        return bound

    def _bound_of(self, here: State, there: State, reduced: int, new: int) -> int:
        """All ranks together receive what they lack, at the rate inside a node, and nodes at that between nodes.

        Args:
            reduced, new: axes that are reduced, and those that become pending: their ranks need an element once.
        """
        moves, known = self.moves, self.moves.rooms.bounds
        key = here[0], here[2], there[0], reduced, new
        found = known.get(key)
        if found is None:
            found = known[key] = self._rates(here, there, reduced, new)
        far, rate, worst = found
        if rate <= 0:
            return 0
        latencies = moves.prices.latencies
        bytes = moves.elements * min(moves.itemsizes[here[3]], moves.itemsizes[there[3]])
        return max(0, int(max(latencies[far] + bytes * rate, latencies[0] + bytes * worst)) - SLACK)

    def _rates(self, here: State, there: State, reduced: int, new: int) -> tuple[bool, float, float]:
        """Return whether nodes exchange data, and nanoseconds a byte of the value: of all ranks, and of the worst."""
        (have, used, pending, _), (want, used_there, _, _) = here, there
        prices, rooms = self.moves.prices, self.moves.rooms
        counts, nodes = prices.counts, prices.far
        total = shared = 1 / counts[used_there]  # of a rank
        total_far = shared_far = 1 / nodes[used_there]  # of a node
        free = ~(used | pending) & (len(counts) - 1)
        if not reduced or nodes[reduced] == 1:
            for k, (a, b) in enumerate(zip(rooms.places(have), rooms.places(want), strict=True)):
                if a is not None and a != b and not new >> k & 1:
                    shared /= prices.sizes[k]
                    shared_far /= prices.nodes[k]
        lacked, far = (total - shared) / counts[new], (total_far - shared_far) / nodes[new]
        if reduced:
            share = 1 / (counts[used] * counts[reduced] * counts[free])
            lacked = share * (counts[reduced] - 1) + max(0.0, total / counts[new] - share)
            if nodes[reduced] > 1:
                share = 1 / (nodes[used] * nodes[reduced] * nodes[free])
                far = share * (nodes[reduced] - 1) + max(0.0, total_far / nodes[new] - share)
        if lacked <= 0:
            return False, 0.0, 0.0
        far /= prices.inside
        near, between = prices.rates
        worst = 0.0
        if not reduced and not new:
            count, moved = rooms.union(have, want)
            worst = (1 / counts[used_there] - (0 if moved else 1 / count)) * near
        return far > 0, lacked * near + far * (between - near), worst

    def _least_exchange(self, here: State, there: State) -> int:
        """Return nanoseconds that a redistribute takes at least."""
        moves, known = self.moves, self.moves.rooms.least_exchanges
        key = here[0], there[0]
        found = known.get(key)
        if found is None:
            found = known[key] = self._exchange_rates(here, there)
        latency, rate = found
        return max(0, int(latency + moves.elements * moves.itemsizes[here[3]] * rate) - SLACK)

    def _exchange_rates(self, here: State, there: State) -> tuple[float, float]:
        """Return the nanoseconds of the messages of a redistribute, and those of each byte of the value."""
        prices, rooms = self.moves.prices, self.moves.rooms
        count, moved = rooms.union(here[0], there[0])
        lacked = 1 / prices.counts[there[1]] - (0 if moved else 1 / count)
        if lacked <= 0:
            return 0.0, 0.0
        far = False
        if prices.far[-1] > 1:
            for have, want, n in zip(rooms.places(here[0]), rooms.places(there[0]), prices.nodes, strict=True):
                far |= n > 1 and have is not None and have != want
        partners = max(1, int(lacked * count + 1e-6))
        return max(1, prices.latencies[0] and partners) * prices.latencies[far], lacked * prices.rates[far]


def _paid(item: tuple[State, tuple[int, int]]) -> tuple[int, int]:
    return item[1]


class _Costs:
    """The least cost of states that can be reached from one.

    Attributes:
        paid: (nanoseconds, transfers) of a state.
    """

    def __init__(self, first: State) -> None:
        self.first = first
        self.paid: dict[State, tuple[int, int]] = {first: (0, 0)}
        self._came: dict[State, tuple[Move, State]] = {}

    def grow(
        self, edges: Callable[[State], Sequence[Edge]], bound: Callable[[State], int], search: Search
    ) -> Iterator[State]:
        """Yield states, those with the least bound first, while a path over them may be better than the best.

        Args:
            edges: the moves of a state.
            bound: nanoseconds that a state is away from the end, or fewer.
        """
        count = seen = 0
        queue = [(bound(self.first), 0, 0, self.first, (0, 0))]
        paid, came = self.paid, self._came
        while queue:
            least, steps, _, here, cost = heapq.heappop(queue)
            if (least, steps, 0) >= search.best:
                break
            if cost > paid[here]:
                continue
            yield here
            if (seen := seen + 1) == MOST:
                break
            most = search.best[0]
            for price, state, move in edges(here):
                new = cost[0] + price, cost[1] + 1
                if new[0] <= most and ((old := paid.get(state)) is None or new < old):
                    least = new[0] + bound(state)
                    if least <= most:
                        paid[state] = new
                        came[state] = move, here
                        count += 1
                        heapq.heappush(queue, (least, new[1], count, state, new))

    def prices(self, last: State) -> tuple[int, ...]:
        """Return the prices of the moves between the first state and ``last``, from the first on."""
        totals = [self.paid[last][0]]
        while last != self.first:
            last = self._came[last][1]
            totals.append(self.paid[last][0])
        return tuple([a - b for a, b in itertools.pairwise(totals)])[::-1]

    def path(self, last: State, *, backwards: bool = False) -> Path:
        """Return the moves to ``last``, or those from it; each with the state that follows."""
        path = []
        while last != self.first:
            move, other = self._came[last]
            path.append((move, other if backwards else last))
            last = other
        return tuple(path if backwards else path[::-1])
