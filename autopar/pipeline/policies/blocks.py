"""Repeat a building block: the passes of one micro-batch through a V of two stages a rank.

After Qi et al., "Pipeline parallelism with controllable memory", 2024. In a block each pass takes one unit of time, and
from one rank to the next the passes of a kind are a fixed offset apart. The block is repeated every six units, which is
what a rank needs for one micro-batch. The memory depends on how long a block keeps its activations: on each rank the
sum of the four offsets over twelve, times the number of ranks. With offsets of 1 this is a third of the ranks, with 1 2
1 2 a half. It is the same on all ranks, since the offsets of the rank's two stages have equal sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import product

from autopar.pipeline.dataflow import reads
from autopar.pipeline.rows import rows
from autopar.pipeline.task import Slot, Table, Task

# units from a rank to the next: forwards on the way there and back, backwards there and back
Offsets = tuple[int, int, int, int]
Times = tuple[int, int, int, int]  # when a rank does these four passes

PERIOD = 6
PASSES = (("FW", 0), ("FW", 1), ("BW", 1), ("BW", 0))  # each with the rank's stage that it belongs to


def block(ranks: int, offsets: Offsets) -> list[Times]:
    """Return the passes of each rank in the shortest block in which no two share a unit when it is repeated.

    At each turn a micro-batch may have to wait. With offsets of 1 the first and the third pass of a rank are 2 p + w
    units apart, so the wait w is 2 if p is a multiple of 3, else 0.
    """
    last = ranks - 1
    forward, forward_back, backward, backward_back = offsets
    for waits in sorted(product(range(PERIOD), repeat=3), key=sum):
        turn = forward * last + 1 + waits[0]  # when the last rank begins its second stage
        loss = turn + forward_back * last + 1 + waits[1]
        home = loss + backward * last + 1 + waits[2]
        times = [
            (forward * r, turn + forward_back * (last - r), loss + backward * r, home + backward_back * (last - r))
            for r in range(ranks)
        ]
        if all(len({time % PERIOD for time in rank_times}) == len(rank_times) for rank_times in times):
            return times
    raise AssertionError(f"no building block of {ranks} ranks has the offsets {offsets}")


def repeated(offsets: Offsets, most: Callable[[int], int]) -> Callable[[int, int], Table]:
    """Return a policy's table: the passes of each rank in the order of the repeated block, each as early as possible.

    A weight gradient fills time in which its rank would wait, and precedes a forward for which there is no memory.

    Args:
        most: ranks → how many micro-batches a rank may keep; as many as the repeated block keeps.
    """

    def table(ranks: int, batches: int) -> Table:
        rank_of = [*range(ranks), *reversed(range(ranks))]
        orders = [
            _order(rank_times, (rank, 2 * ranks - 1 - rank), batches)
            for rank, rank_times in enumerate(block(ranks, offsets))
        ]
        return rows(_with_weights(orders, 2 * most(ranks), len(rank_of)), rank_of)

    return table


def _order(rank_times: Times, stages: tuple[int, int], batches: int) -> deque[Task]:
    """Return forwards and backwards of a rank, by their units in the repeated block."""
    units = sorted(
        (time + PERIOD * batch, batch, of)
        for batch in range(batches)
        for time, of in zip(rank_times, PASSES, strict=True)
    )
    return deque(Task(kind, stages[chunk], batch) for _, batch, (kind, chunk) in units)


def _with_weights(orders: list[deque[Task]], most: int, stages: int) -> list[list[Slot]]:
    """Return the orders with their weight gradients, unit by unit.

    No rank keeps activations of more than ``most`` passes.
    """
    slots: list[list[Slot]] = [[] for _ in orders]
    left: list[deque[Task]] = [deque() for _ in orders]
    activations = [0] * len(orders)
    done: set[Task] = set()
    while any(orders) or any(left):
        now: list[Task] = []
        for rank, order in enumerate(orders):
            # its inputs were computed in an earlier unit
            task = order[0] if order and done.issuperset(reads(order[0], stages)) else None
            if task is not None and not (task.kind == "FW" and activations[rank] >= most and left[rank]):
                order.popleft()
                activations[rank] += task.kind == "FW"
                if task.kind == "BW":
                    left[rank].append(Task("WW", task.stage, task.batch))
            elif left[rank]:
                task = left[rank].popleft()
                activations[rank] -= 1
            else:
                continue
            now.append(task)
            slots[rank].append(Slot((task,)))
        done.update(now)
    return slots
