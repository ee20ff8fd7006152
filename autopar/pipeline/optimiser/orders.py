"""Run orders of tasks as plain numbers, some ten times faster than ``simulate``.

The order of a rank is a list of codes ``4 * stage + pass``. It has no micro-batches: the n-th task of a code is of
micro-batch n. This loses nothing. Micro-batches are alike, so in any schedule the n-th forward of each stage may be
called that of micro-batch n, and so may backwards and weight gradients: the n-th pass of a stage still comes after n
passes of the stage that it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from autopar.pipeline.bounds import Costs
from autopar.pipeline.policies.phases import order
from autopar.pipeline.rows import rows
from autopar.pipeline.schedule import PipelineSchedule
from autopar.pipeline.shape import stages_of

# INPUT is the gradient of the input, WEIGHT that of the weights, FULL both at once
FORWARD, INPUT, WEIGHT, FULL = range(4)
LETTERS = "FIWB"  # the same in ``phases``
Order = list[int]
Orders = list[Order]


def orders_of(schedule: PipelineSchedule) -> Orders:
    """Return the orders of a schedule; tasks of one slot come one after the other."""
    passes = {"FW": FORWARD, "BW": INPUT if schedule.is_split else FULL, "WW": WEIGHT}
    orders: Orders = [[] for _ in range(schedule.ranks)]
    for _, rank, task in schedule.tasks():
        if task.kind[1] == "W":
            orders[rank].append(4 * task.stage + passes[task.kind])
    return orders


def schedule_of(orders: Orders, rank_of: Sequence[int], batches: int, name: str) -> PipelineSchedule:
    """Return the schedule of orders, with messages.

    A weight gradient is of the oldest micro-batch whose backward left one. If no backward is split, there are no weight
    gradients; otherwise an unsplit backward has its weight gradient in the same slot.
    """
    split = any(code & 3 == WEIGHT for own in orders for code in own)
    slots = []
    for own, stages in zip(orders, stages_of(rank_of), strict=True):
        words = " ".join(f"{LETTERS[code & 3]}{stages.index(code >> 2)}" for code in own)
        slots.append(order([(1, words)], stages, batches, split))
    return PipelineSchedule(rows(slots, rank_of), batches, tuple(rank_of), name).known_right().with_messages()


def lengths(cost: Costs, orders: Orders, ends: list[float], forward: list[list[float]]) -> list[float]:
    """Return how long each rank takes: until its end, or for the span from its first begin to its end.

    Args:
        ends: for each rank, the end of its last task.
        forward: for each stage, the arrival times of its forwards' inputs. A rank begins with a forward, and waits only
            for that.
    """
    if cost.objective == "makespan":
        return ends
    return [end - forward[order[0] >> 2][0] for order, end in zip(orders, ends, strict=True)]


class Paper:
    """Runs orders without making a schedule.

    Attributes:
        cost: times and sizes.
        ends: for each rank, the end of each task of the last run.
        lengths: for each rank, its length in the last run by the objective of ``cost``.
        causes: for each rank and task of the last run, the code and number of the task whose result it waited for;
            ``None`` if it began when its rank was free.
    """

    def __init__(self, cost: Costs, batches: int) -> None:
        self.cost, self.batches = cost, batches
        self.ends: list[list[float]] = []
        self.lengths: list[float] = []
        self.causes: list[list[tuple[int, int] | None]] = []
        self.durations = []
        for f, b, w in zip(cost.forward, cost.backward, cost.weight, strict=True):
            self.durations += [f, b, w, b + w]

    def length(self, orders: Orders) -> float:
        """Return the makespan or the longest span of a rank, by the objective of ``cost``.

        It is infinite if ranks wait for each other forever.
        """
        rank_of, transfer, durations = self.cost.rank_of, self.cost.transfer, self.durations
        stages, ranks = len(rank_of), len(orders)
        # when the input of the n-th forward of a stage arrives
        forward: list[list[float]] = [[] for _ in range(stages)]
        forward[0] = [0.0] * self.batches
        backward: list[list[float]] = [[] for _ in range(stages)]
        begun = [0] * (2 * stages)
        link = [0.0] * (stages * stages)
        waits = [-1] * (2 * stages)  # the rank that waits for a forward or backward of a stage
        at, free = [0] * ranks, [0.0] * ranks
        ends: list[list[float]] = [[] for _ in range(ranks)]
        causes: list[list[tuple[int, int] | None]] = [[] for _ in range(ranks)]
        self.ends, self.causes = ends, causes
        todo = list(range(ranks - 1, -1, -1))
        last = stages - 1
        while todo:
            rank = todo.pop()
            order, now, rank_ends, why = orders[rank], free[rank], ends[rank], causes[rank]
            for i in range(at[rank], len(order)):
                code = order[i]
                stage, kind = code >> 2, code & 3
                if kind == WEIGHT:
                    now += durations[code]
                    rank_ends.append(now)
                    why.append(None)
                    continue
                if kind == FORWARD:
                    key, arrivals = 2 * stage, forward[stage]
                else:
                    key, arrivals = 2 * stage + 1, backward[stage]
                n = begun[key]
                if n >= len(arrivals):
                    waits[key] = rank
                    at[rank] = i
                    break
                begun[key] = n + 1
                if arrivals[n] > now:
                    now = arrivals[n]
                    why.append((code, n))
                else:
                    why.append(None)
                now += durations[code]
                rank_ends.append(now)
                if kind == FORWARD:
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
                    link_number = rank * stages + rank_of[to]
                    free_at = link[link_number]
                    link[link_number] = arrival = (free_at if free_at > now else now) + c
                    passes[to].append(arrival)
                    key = 2 * to + (kind != FORWARD)
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
