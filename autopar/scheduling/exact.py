"""Find the shortest order of a few ops by branch and bound.

Collectives are whole. A partial order is dropped where the time that its ops take, and the longest path that is left,
show that it cannot become the shortest. Equal states are visited once.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.scheduling.bounds import Bound
from autopar.scheduling.graph import Graph
from autopar.scheduling.lines import Draft

MOST = 8  # ops


def best_order(
    graph: Graph, bound: Bound, is_direct: bool, most: float, value: Callable[[Draft], float]
) -> Draft | None:
    """Return the lines of the shortest order of all, or ``None`` if no order is shorter than ``most``.

    Args:
        graph: at most 8 ops.
        bound: the bound of these ops, with heads and tails.
        is_direct: whether the host that issues lines also computes.
        most: the seconds to beat.
        value: draft → its seconds; ``inf`` for one that is not allowed.
    """
    search = _Search(graph, bound, is_direct, most, value)
    search.extend((), 0, 0.0, (0.0,) * len(graph.streams), (0.0,) * len(graph))
    return search.best


class _Search:
    """A depth-first search over orders. ``best``: the shortest draft so far, ``most``: its seconds."""

    def __init__(
        self, graph: Graph, bound: Bound, is_direct: bool, most: float, value: Callable[[Draft], float]
    ) -> None:
        self.graph, self.bound, self.is_direct = graph, bound, is_direct
        self.most, self.value = most, value
        self.best: Draft | None = None
        self.seen: set[tuple[object, ...]] = set()

    def extend(
        self, order: tuple[int, ...], done: int, now: float, free: tuple[float, ...], ended: tuple[float, ...]
    ) -> None:
        """Try each next op. ``done``: the ops so far, as bits; ``now``: when computation is free."""
        graph = self.graph
        if len(order) == len(graph):
            self.finish(order)
            return
        for i in graph.order:
            if done >> i & 1 or any(not done >> j & 1 for j in graph.before[i]):
                continue
            then = max([now, *(ended[j] for j in graph.before[i] if graph.stream[j])])
            ends, frees, stream = list(ended), list(free), graph.stream[i]
            if stream:
                ready = max([free[stream], *(ended[j] for j in graph.before[i]), then * self.is_direct])
                ends[i] = frees[stream] = ready + graph.seconds[i]
            else:
                ends[i] = then = then + graph.seconds[i]
            state = done | 1 << i, then, tuple(frees), tuple(ends)
            if self.least(state) < self.most - 1e-12 * abs(self.most) and not self.repeats(state, order):
                self.extend((*order, i), *state)

    def least(self, state: tuple[int, float, tuple[float, ...], tuple[float, ...]]) -> float:
        """Return a lower bound of the seconds of all orders that begin like this."""
        done, now, _, ended = state
        graph, tails = self.graph, self.bound.tails
        left = [i for i in graph.order if not done >> i & 1]
        return max(
            now + sum(graph.seconds[i] for i in left if not graph.stream[i]),
            *(ended[i] + tails[i] for i in graph.order if done >> i & 1),
            *(max([ended[j] for j in graph.before[i]], default=0.0) + graph.seconds[i] + tails[i] for i in left),
        )

    def repeats(self, state: tuple[object, ...], order: tuple[int, ...]) -> bool:
        """Return whether this state was visited. Where memory counts, the order so far is part of the state."""
        key = (*state, order) if any(self.graph.memory) else state
        if key in self.seen:
            return True
        self.seen.add(key)
        return False

    def finish(self, order: tuple[int, ...]) -> None:
        draft = Draft(self.graph)
        for i in order:
            draft.issue(i)
        draft.finished()
        seconds = self.value(draft)
        if seconds < self.most:
            self.most, self.best = seconds, draft
