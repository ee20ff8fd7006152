"""Compute the memory of orders, including the buffers of messages, without making their schedule.

This is some twenty times faster than ``memory``. As in ``buffers``, a receive buffer is in use from the row after the
one in which its message was made, and a send buffer until the first task that can only run after the message was read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, repeat
from math import inf

from autopar.pipeline.bounds import EPSILON, Costs
from autopar.pipeline.optimiser.orders import FORWARD, WEIGHT, Order, Orders, Paper


class Peaks:
    """The peak memory of orders.

    Attributes:
        cost: times and sizes.
        buffers: whether messages use memory; otherwise only activations do.
        around: whether messages go to ranks that are not neighbours.
    """

    def __init__(self, cost: Costs, batches: int) -> None:
        self.cost, stages = cost, len(cost.rank_of)
        self.buffers = any(cost.boundary)
        # Between neighbours in a row no message arrives earlier by way of other ranks; around a loop it may.
        self.around = any(abs(rank - neighbour) > 1 for rank, neighbour in pairwise(cost.rank_of))
        ones = [1.0] * stages
        # Each task takes one row, and can be in the row after that of its input.
        self.table = Paper(
            replace(cost, forward=ones, backward=ones, weight=ones, transfer=[0.0] * (stages - 1)), batches
        )
        self.table.durations = [1.0] * (4 * stages)
        nothing = [0.0] * stages
        self.kept = self._changes(nothing, nothing)
        self.used = self._changes([0.0, *cost.boundary], [*cost.boundary, 0.0])

    def _changes(self, before: Sequence[float], behind: Sequence[float]) -> tuple[list[float], list[float]]:
        """Return code → the memory that is allocated when it begins, and what is freed when it ends.

        Args:
            before, behind: the buffer of a message between each stage and the one before it, and the one after it.
        """
        allocated, freed = [], []
        for a, w, left, right in zip(self.cost.activation, self.cost.later, before, behind, strict=True):
            allocated += [a + right, left, 0.0, left]
            freed += [left, a - w, w + right, a + right]
        return allocated, freed

    def fits(self, order: Order, rank: int) -> bool:
        """Return whether the activations of a rank are within its limit, without buffers of messages."""
        limit = self.cost.limit[rank]
        if limit == inf:
            return True
        return _most(order, repeat((0.0, 0.0)), self.cost.fixed[rank], self.kept) <= limit * (1 + EPSILON)

    def within(self, orders: Orders) -> bool:
        """Return whether all ranks are within the limit."""
        return not any(self.excess(orders))

    def excess(self, orders: Orders) -> list[float]:
        """Return by how much each rank exceeds its limit."""
        return [
            max(0.0, peak - limit * (1 + EPSILON)) for peak, limit in zip(self.of(orders), self.cost.limit, strict=True)
        ]

    def of(self, orders: Orders) -> list[float]:
        """Return the most memory of each rank, for orders that do not wait for each other forever."""
        return [
            _most(order, messages, fixed, self.used)
            for order, messages, fixed in zip(orders, self._messages(orders), self.cost.fixed, strict=True)
        ]

    def _messages(self, orders: Orders) -> list[list[list[float]]]:
        """Return for each task the buffers received since the task before it, and the buffers it releases."""
        changes = [[[0.0, 0.0] for _ in order] for order in orders]
        if not self.buffers:
            return changes
        self.table.length(orders)
        ends, rank_of, boundary = self.table.ends, self.cost.rank_of, self.cost.boundary
        last = len(rank_of) - 1
        # positions of the n-th forward and backward of a stage
        places: list[list[int]] = [[] for _ in range(2 * last + 2)]
        for order in orders:
            for place, code in enumerate(order):
                if code & 3 != WEIGHT:
                    places[2 * (code >> 2) + (code & 3 != FORWARD)].append(place)
        left = [len(rank_ends) for rank_ends in places]
        never = max(map(len, orders))
        # For each rank, the first task of every other rank that comes after a message sent from here or later; for
        # readers, its value then.
        soonest = [[never] * len(orders) for _ in orders]
        since: dict[tuple[int, int], list[int]] = {}
        tasks = [(end, rank, place) for rank, rank_ends in enumerate(ends) for place, end in enumerate(rank_ends)]
        for _, rank, place in reversed(sorted(tasks) if self.around else tasks):
            code = orders[rank][place]
            stage, kind = code >> 2, code & 3
            if kind == WEIGHT:
                continue
            step, key = (1, 2 * stage) if kind == FORWARD else (-1, 2 * stage + 1)
            left[key] = n = left[key] - 1
            to, origin, own_soonest = stage + step, stage - step, soonest[rank]
            if 0 <= to <= last and (other := rank_of[to]) != rank:
                reader_place = places[key + 2 * step][n]
                if self.around:
                    own_soonest[:] = map(min, own_soonest, since[other, reader_place])
                own_soonest[other] = min(own_soonest[other], reader_place)
                # Ends are rows plus one: the receive is there before a task that ends more than one row later.
                changes[other][bisect_left(ends[other], ends[rank][place] + 1.0)][0] += boundary[min(stage, to)]
            if 0 <= origin <= last and (other := rank_of[origin]) != rank:
                if self.around:
                    since[rank, place] = list(own_soonest)
                if own_soonest[other] < never:
                    changes[other][own_soonest[other]][1] += boundary[min(stage, origin)]
        return changes


def _most(order: Order, messages: Iterable[Sequence[float]], fixed: float, used: Sequence[Sequence[float]]) -> float:
    """Return the peak of a rank; ``messages`` as from ``Peaks._messages``, ``used`` as from ``Peaks._changes``."""
    allocated, freed = used
    total = most = fixed
    for code, (received, released) in zip(order, messages, strict=False):
        total += received
        if total > most:
            most = total
        total += allocated[code] - released
        if total > most:
            most = total
        total -= freed[code]
    return most
