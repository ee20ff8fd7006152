"""Schedule greedily: whenever a rank is free, it takes the task that its rule prefers among those that can begin.

This follows Zero Bubble's automatic scheduling (Qi et al. 2024): forwards run ahead as far as memory allows, backwards
as soon as possible, and weight gradients in the gaps. A ``PriorityRule`` says how far, how soon and in which gaps; a
search varies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from typing import Any

from autopar.pipeline.bounds import Costs
from autopar.pipeline.optimiser.orders import FORWARD, INPUT, WEIGHT, Order, Orders, lengths


@dataclass(frozen=True)
class PriorityRule:
    """The preferences of a rank.

    Attributes:
        ahead: for each rank, a number of passes in flight (forward begun, backward not): below it a forward comes
            before a backward.
        most: for each rank, the most passes in flight; at least as many as its stages.
        left: for each rank, a number of weight gradients: if more are left, the next weight gradient comes first.
        gap: a weight gradient begins before a message arrives if the wait is at least this part of the gradient's
            duration.
        patience: a forward waits for a backward that arrives within this part of the forward's duration.
        deep: among forwards that can begin, prefer that of the rank's last stage; else of its first.
        back: among backwards, prefer that of the rank's first stage.
    """

    ahead: tuple[int, ...]
    most: tuple[int, ...]
    left: tuple[int, ...]
    gap: float = 1.0
    patience: float = 0.0
    deep: bool = True
    back: bool = True

    def with_one(self, name: str, rank: int, value: int) -> PriorityRule:
        old: tuple[int, ...] = getattr(self, name)
        changed: dict[str, Any] = {name: (*old[:rank], value, *old[rank + 1 :])}
        return replace(self, **changed)


def follow(
    rule: PriorityRule, cost: Costs, batches: int, room: Sequence[float] | None = None
) -> tuple[float, Orders] | None:
    """Return the orders that a rule makes, and their length by ``cost``; ``None`` if memory does not suffice.

    A forward leaves enough memory for one more forward of each later stage of its rank. Therefore none of these waits
    for memory that is never freed, and no rank waits forever.

    Args:
        room: the memory for activations on each rank; ``None``: all of it.
    """
    rank_of, stages_of = cost.rank_of, cost.stages_of
    stages, last = len(rank_of), len(rank_of) - 1
    room = cost.room if room is None else room
    need = [sum(cost.activation[s] for s in stages_of[rank_of[stage]] if s >= stage) for stage in range(stages)]
    forward: list[list[float]] = [[] for _ in range(stages)]
    forward[0] = [0.0] * batches
    backward: list[list[float]] = [[] for _ in range(stages)]
    done = [0] * (4 * stages)
    free, used = [0.0] * len(stages_of), [0.0] * len(stages_of)
    link: dict[tuple[int, int], float] = {}
    orders: Orders = [[] for _ in stages_of]
    heap = [(0.0, rank) for rank in range(len(stages_of))]
    missing = 3 * batches * stages
    while heap:
        now, rank = heappop(heap)
        if now < free[rank]:
            continue
        code, soon = _choose(rule, cost, rank, now, batches, forward, backward, done, room[rank] - used[rank], need)
        if code < 0:
            if soon < inf:
                heappush(heap, (soon, rank))
            continue
        stage, kind = divmod(code, 4)
        end = now + (cost.forward, cost.backward, cost.weight)[kind][stage]
        done[code] += 1
        missing -= 1
        orders[rank].append(code)
        free[rank] = end
        heappush(heap, (end, rank))
        if kind == FORWARD:
            used[rank] += cost.activation[stage]
            if stage == last:
                backward[last].append(end)
                continue
            to, arrivals, c = stage + 1, forward, cost.transfer[stage]
        elif kind == INPUT:
            used[rank] += cost.later[stage] - cost.activation[stage]
            if not stage:
                continue
            to, arrivals, c = stage - 1, backward, cost.transfer[stage - 1]
        else:
            used[rank] -= cost.later[stage]
            continue
        other = rank_of[to]
        if other != rank:
            end = link[rank, other] = max(link.get((rank, other), 0.0), end) + c
            heappush(heap, (max(end, free[other]), other))
        arrivals[to].append(end)
    return None if missing else (max(lengths(cost, orders, free, forward)), orders)


def one_by_one(cost: Costs, batches: int) -> Orders:
    """Run one micro-batch after the other through all stages, which needs the least memory."""
    ones = tuple(len(rank_stages) for rank_stages in cost.stages_of)
    followed = follow(
        PriorityRule((0,) * len(ones), ones, (0,) * len(ones)), replace(cost, limit=[inf] * len(ones)), batches
    )
    assert followed is not None
    return followed[1]


def _choose(rule: PriorityRule, cost: Costs, rank: int, now: float, batches: int, forward: list[list[float]],
            backward: list[list[float]], done: Order, room: float, need: list[float]) -> tuple[int, float]:  # fmt: skip
    """Return the code of the task that a rank begins; or -1, and the time at which it should choose again."""
    best_forward = best_backward = weight = -1
    soon_forward = soon_backward = inf
    begun = pending = 0
    rank_stages = cost.stages_of[rank]
    for stage in rank_stages:
        begun += done[4 * stage] - done[4 * stage + INPUT]
    for number, stage in enumerate(rank_stages):
        code = 4 * stage
        f = done[code]
        if (
            f < batches
            and need[stage] <= room
            and f < len(forward[stage])
            and begun + len(rank_stages) - number <= rule.most[rank]
        ):
            if forward[stage][f] <= now:
                best_forward = code if rule.deep or best_forward < 0 else best_forward
            elif forward[stage][f] < soon_forward:
                soon_forward = forward[stage][f]
    for stage in reversed(rank_stages) if rule.back else rank_stages:
        code = 4 * stage
        b = done[code + INPUT]
        if done[code + WEIGHT] < b:
            pending += b - done[code + WEIGHT]
            if weight < 0 or b - done[code + WEIGHT] > done[weight - 1] - done[weight]:
                weight = code + WEIGHT
        if b < len(backward[stage]):
            if backward[stage][b] <= now:
                best_backward = code + INPUT
            elif backward[stage][b] < soon_backward:
                soon_backward = backward[stage][b]
    if weight >= 0 and pending > rule.left[rank]:
        return weight, now
    if best_forward >= 0 and (best_backward < 0 or begun < rule.ahead[rank]):
        if (
            best_backward >= 0
            or begun < rule.ahead[rank]
            or soon_backward - now >= rule.patience * cost.forward[best_forward >> 2]
        ):
            return best_forward, now
        soon_forward = inf
    if best_backward >= 0:
        return best_backward, now
    soon = min(soon_forward, soon_backward)
    if weight >= 0 and soon - now >= rule.gap * cost.weight[weight >> 2]:
        return weight, now
    return -1, soon
