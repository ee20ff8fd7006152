"""Orders as plain numbers, and how long they take: what ``simulate`` says, some ten times faster.

An order of a rank is a list of codes ``4 * stage + pass``. Micro-batches are not in it: the n-th of a code is of micro-batch n.
That loses nothing. Micro-batches are alike, so in any schedule the n-th forward of each stage may be called that of micro-batch
n, and so for the backwards and weight gradients: the n-th pass of a stage still comes after n passes of what it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from autopar.pipeline.bounds import EPSILON, Costs
from autopar.pipeline.rows import rows
from autopar.pipeline.schedule import PipelineSchedule
from autopar.pipeline.task import Slot, Task

FORWARD, INPUT, WEIGHT, FULL = range(4)  # the input's gradient, the weights', and both in one
Order = list[int]
Orders = list[Order]


def orders_of(schedule: PipelineSchedule) -> Orders:
    """Those of a schedule; what shares a slot comes one after the other."""
    passes = {"FW": FORWARD, "BW": INPUT if schedule.is_split else FULL, "WW": WEIGHT}
    orders: Orders = [[] for _ in range(schedule.ranks)]
    for _, rank, task in schedule.tasks():
        if task.kind[1] == "W":
            orders[rank].append(4 * task.stage + passes[task.kind])
    return orders


def schedule_of(orders: Orders, rank_of: Sequence[int], batches: int, name: str) -> PipelineSchedule:
    """The schedule, with messages; a weight gradient is of the oldest micro-batch whose backward left one.

    Where no backward is split there are no weight gradients; else one that is not has its own in its slot.
    """
    split = any(code & 3 == WEIGHT for order in orders for code in order)
    slots: list[list[Slot]] = [[] for _ in orders]
    for order, own in zip(orders, slots, strict=True):
        begun: dict[int, int] = {}
        left: dict[int, list[int]] = {}
        for code in order:
            stage, of = divmod(code, 4)
            if of == WEIGHT:
                own.append(Slot((Task("WW", stage, left[stage].pop(0)),)))
                continue
            key = 4 * stage + (of != FORWARD)
            batch = begun[key] = begun.get(key, -1) + 1
            if of == INPUT:
                left.setdefault(stage, []).append(batch)
            task = Task("FW" if of == FORWARD else "BW", stage, batch)
            own.append(Slot((task, Task("WW", stage, batch)) if of == FULL and split else (task,)))
    return PipelineSchedule(rows(slots, rank_of), batches, tuple(rank_of), name).known_right().with_messages()


def lengths(cost: Costs, orders: Orders, ends: list[float], forward: list[list[float]]) -> list[float]:
    """How long each rank takes: up to its end, or by the span from its first begin.

    Args:
        ends: of each rank, when its last task ends.
        forward: of each stage, when what its forwards read is there. A rank begins with a forward, and waits for nothing else.
    """
    if cost.objective == "makespan":
        return ends
    return [end - forward[order[0] >> 2][0] for order, end in zip(orders, ends, strict=True)]


class Paper:
    """Runs orders on paper.

    Attributes:
        cost: times and sizes.
        ends: of each rank, when each task of the last run ended.
        lengths: of each rank, how long it took in the last run by the objective of ``cost``.
        causes: of each rank and task of the last run, the code and number of the task whose result it waited for; ``None``
            where it began when its rank was free.
    """

    def __init__(self, cost: Costs, batches: int) -> None:
        self.cost, self.batches = cost, batches
        self.ends: list[list[float]] = []
        self.lengths: list[float] = []
        self.causes: list[list[tuple[int, int] | None]] = []
        self.durations = []
        for f, b, w in zip(cost.forward, cost.backward, cost.weight, strict=True):
            self.durations += [f, b, w, b + w]
        rank_of, self.pair = cost.rank_of, {}
        for stage in range(len(rank_of) - 1):
            for one, other in ((stage, stage + 1), (stage + 1, stage)):
                self.pair[one, other] = rank_of[one] * len(rank_of) + rank_of[other]

    def length(self, orders: Orders) -> float:
        """The makespan or the longest span of a rank, by the objective of ``cost``; infinite where ranks wait for each other for ever."""
        rank_of, transfer, durations, pair = self.cost.rank_of, self.cost.transfer, self.durations, self.pair
        stages, ranks = len(rank_of), len(orders)
        forward: list[list[float]] = [[] for _ in range(stages)]  # when what the n-th forward of a stage reads is there
        forward[0] = [0.0] * self.batches
        backward: list[list[float]] = [[] for _ in range(stages)]
        begun = [0] * (2 * stages)
        link = [0.0] * (stages * stages)
        waits = [-1] * (2 * stages)  # the rank that waits for a forward, a backward of a stage
        at, free = [0] * ranks, [0.0] * ranks
        self.ends = ends = [[] for _ in range(ranks)]
        self.causes = causes = [[] for _ in range(ranks)]
        todo = list(range(ranks - 1, -1, -1))
        last = stages - 1
        while todo:
            rank = todo.pop()
            order, now, own, why = orders[rank], free[rank], ends[rank], causes[rank]
            for i in range(at[rank], len(order)):
                code = order[i]
                stage, of = code >> 2, code & 3
                if of == WEIGHT:
                    now += durations[code]
                    own.append(now)
                    why.append(None)
                    continue
                if of == FORWARD:
                    key, there = 2 * stage, forward[stage]
                else:
                    key, there = 2 * stage + 1, backward[stage]
                n = begun[key]
                if n >= len(there):
                    waits[key] = rank
                    at[rank] = i
                    break
                begun[key] = n + 1
                if there[n] > now:
                    now = there[n]
                    why.append((code, n))
                else:
                    why.append(None)
                now += durations[code]
                own.append(now)
                if of == FORWARD:
                    if stage == last:
                        backward[last].append(now)
                        continue
                    to, passes, c = stage + 1, forward, transfer[stage]
                elif stage:
                    to, passes, c = stage - 1, backward, transfer[stage - 1]
                else:
                    continue
                if rank_of[to] == rank:
                    passes[to].append(now)
                else:
                    which = pair[stage, to]
                    free_at = link[which]
                    link[which] = arrival = (free_at if free_at > now else now) + c
                    passes[to].append(arrival)
                    key = 2 * to + (of != FORWARD)
                    if waits[key] >= 0:
                        todo.append(waits[key])
                        waits[key] = -1
            else:
                at[rank] = len(order)
            free[rank] = now
        if any(at[rank] < len(orders[rank]) for rank in range(ranks)):
            return inf
        self.lengths = lengths(self.cost, orders, free, forward)
        return max(self.lengths)

    def peak(self, order: Order, rank: int) -> float:
        """The most memory that a rank's activations take, and what is fixed; buffers of messages are left out."""
        cost, total = self.cost, self.cost.fixed[rank]
        most = total
        for code in order:
            stage, of = code >> 2, code & 3
            if of == FORWARD:
                total += cost.activation[stage]
                if total > most:
                    most = total
            elif of == INPUT:
                total += cost.later[stage] - cost.activation[stage]
            elif of == WEIGHT:
                total -= cost.later[stage]
            else:
                total -= cost.activation[stage]
        return most

    def fits(self, order: Order, rank: int) -> bool:
        limit = self.cost.limit[rank]
        return limit == inf or self.peak(order, rank) <= limit * (1 + EPSILON)

