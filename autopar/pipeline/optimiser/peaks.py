"""The memory of orders with the buffers of messages: what ``memory`` says of their schedule, some twenty times faster.

As ``buffers`` has it, a receive buffer is taken in the row after that in which its message was made, and a send buffer is
released before the first task that can only happen after the message was read.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from itertools import pairwise

from autopar.pipeline.bounds import EPSILON, Costs
from autopar.pipeline.optimiser.orders import FORWARD, FULL, INPUT, Orders, Paper


class Peaks:
    """What orders need at most.

    Attributes:
        cost: times and sizes.
        buffers: whether messages take memory; else activations are all.
        around: whether messages go to others than the neighbours of a rank.
    """

    def __init__(self, cost: Costs, batches: int) -> None:
        self.cost, stages = cost, len(cost.rank_of)
        self.buffers = any(cost.boundary)
        # Between neighbours in a row nothing comes sooner by others; around a loop it may.
        self.around = any(abs(one - other) > 1 for one, other in pairwise(cost.rank_of))
        ones = [1.0] * stages
        # Each task takes one row, and can be in the row after that of what it reads.
        self.table = Paper(replace(cost, forward=ones, backward=ones, weight=ones, transfer=[0.0] * (stages - 1)), batches)
        self.table.durations = [1.0] * (4 * stages)
        before, behind = [0.0, *cost.boundary], [*cost.boundary, 0.0]
        self.taken, self.given = [], []  # by a code: when it begins; when it ends
        for a, w, left, right in zip(cost.activation, cost.later, before, behind, strict=True):
            self.taken += [a + right, left, 0.0, left]
            self.given += [left, a - w, w + right, a + right]

    def within(self, orders: Orders) -> bool:
        """Whether all ranks are within the limit."""
        return not any(self.excess(orders))

    def excess(self, orders: Orders) -> list[float]:
        """By how much each rank is above its limit."""
        return [max(0.0, peak - limit * (1 + EPSILON)) for peak, limit in zip(self.of(orders), self.cost.limit, strict=True)]

    def of(self, orders: Orders) -> list[float]:
        """The most memory of each rank; of orders that do not wait for each other for ever."""
        before = self._messages(orders)
        peaks = []
        for order, messages, fixed in zip(orders, before, self.cost.fixed, strict=True):
            total = most = fixed
            for code, (received, released) in zip(order, messages, strict=True):
                total += received
                if total > most:
                    most = total
                total += self.taken[code] - released
                if total > most:
                    most = total
                total -= self.given[code]
            peaks.append(most)
        return peaks

    def _messages(self, orders: Orders) -> list[list[list[float]]]:
        """What each task finds received since the task before it, and what it releases."""
        changes = [[[0.0, 0.0] for _ in order] for order in orders]
        if not self.buffers:
            return changes
        self.table.length(orders)
        ends, rank_of, boundary, last = self.table.ends, self.cost.rank_of, self.cost.boundary, len(self.cost.rank_of) - 1
        places: list[list[int]] = [[] for _ in range(2 * last + 2)]  # of the n-th forward and backward of a stage
        for order in orders:
            for place, code in enumerate(order):
                of = code & 3
                if of in (FORWARD, INPUT, FULL):
                    places[2 * (code >> 2) + (of != FORWARD)].append(place)
        left = [len(own) for own in places]
        never = max(map(len, orders))
        # Of each rank, the first task of every other that comes after what is sent from here or later; of readers, what it was there.
        soonest = [[never] * len(orders) for _ in orders]
        since: dict[tuple[int, int], list[int]] = {}
        backwards = [(end, rank, place) for rank, own in enumerate(ends) for place, end in enumerate(own)][::-1]
        for _, rank, place in sorted(backwards, reverse=True) if self.around else backwards:
            code = orders[rank][place]
            stage, of = code >> 2, code & 3
            if of not in (FORWARD, INPUT, FULL):
                continue
            step, key = (1, 2 * stage) if of == FORWARD else (-1, 2 * stage + 1)
            left[key] = n = left[key] - 1
            to, origin, mine = stage + step, stage - step, soonest[rank]
            if 0 <= to <= last and (other := rank_of[to]) != rank:
                there = places[key + 2 * step][n]
                if self.around:
                    mine[:] = map(min, mine, since[other, there])
                mine[other] = min(mine[other], there)
                # Ends are rows and one: the receive is there before what ends more than one row later.
                changes[other][bisect_left(ends[other], ends[rank][place] + 1.0)][0] += boundary[min(stage, to)]
            if 0 <= origin <= last and (other := rank_of[origin]) != rank:
                if self.around:
                    since[rank, place] = list(mine)
                if mine[other] < never:
                    changes[other][mine[other]][1] += boundary[min(stage, origin)]
        return changes
