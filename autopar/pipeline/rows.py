"""Make a table from the order of each rank's slots: each slot is in the first row after everything that it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from autopar.errors import ScheduleError
from autopar.pipeline.dataflow import made_by, reads, source
from autopar.pipeline.task import EMPTY, Slot, Table, Task, other_end


def rows(orders: Sequence[Sequence[Slot]], rank_of: Sequence[int]) -> Table:
    """Return a table in which each rank keeps its order.

    Missing tasks do not block others; ``verify`` reports them.

    Args:
        orders: the slots of each rank, in their order.

    Raises:
        ScheduleError: ranks wait for each other forever; the error shows the cycle.
    """
    present = {task for slots in orders for slot in slots for task in slot.tasks}
    time: dict[Task, int] = {}
    at, last = [0] * len(orders), [-1] * len(orders)
    times: list[list[int]] = [[] for _ in orders]
    waiting: dict[Task, list[int]] = {}
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        while at[rank] < len(orders[rank]):
            slot = orders[rank][at[rank]]
            together, row = set(slot.tasks), last[rank] + 1
            for need, later in needs(slot, rank_of, present):
                if need in together:
                    continue
                if (done := time.get(need)) is None:
                    waiting.setdefault(need, []).append(rank)
                    break
                row = max(row, done + later)
            else:
                for task in slot.tasks:
                    time.setdefault(task, row)
                    ready += waiting.pop(task, ())
                times[rank].append(row)
                last[rank] = row
                at[rank] += 1
                continue
            break
    if any(at[rank] < len(slots) for rank, slots in enumerate(orders)):
        raise ScheduleError(_cycle(orders, rank_of, present, time, at))
    table = [[EMPTY] * len(orders) for _ in range(max(last, default=-1) + 1)]
    for rank, slots in enumerate(orders):
        for slot, row in zip(slots, times[rank], strict=True):
            table[row][rank] = slot
    return tuple(map(tuple, table))


def needs(slot: Slot, rank_of: Sequence[int], present: Set[Task]) -> Iterator[tuple[Task, int]]:
    """Yield the tasks that must be done before a slot, and by how many rows the slot must be later."""
    for task in slot.tasks:
        if task.kind[1] == "S":
            own = [made_by(task)]
        elif task.kind[1] == "R":
            own = [other_end(task)]
        elif (message := source(task, rank_of)) is not None and message in present:
            rank = rank_of[task.stage]
            own = [message, *(read for read in reads(task, len(rank_of)) if rank_of[read.stage] == rank)]
        else:
            own = [*reads(task, len(rank_of))]
        yield from ((need, int(task.kind[1] != "R")) for need in own if need in present)


def _cycle(
    orders: Sequence[Sequence[Slot]],
    rank_of: Sequence[int],
    present: Set[Task],
    time: dict[Task, int],
    at: Sequence[int],
) -> str:
    """Describe ranks that wait for each other, each for a task that the next has not done."""
    rank = next(rank for rank, order in enumerate(orders) if at[rank] < len(order))
    lines: dict[int, str] = {}
    while rank not in lines:
        slot = orders[rank][at[rank]]
        task, need = next(
            (task, need) for task in slot.tasks for need, _ in needs(Slot((task,)), rank_of, present)
            if need not in time and need not in slot.tasks
        )  # fmt: skip
        other = rank_of[need.stage]
        behind = (
            ""
            if need in orders[other][at[other]].tasks
            else f", which comes after {orders[other][at[other]].tasks[0].where} there"
        )
        lines[rank] = f"  rank {rank}: {task.where} waits for {need.where} on rank {other}{behind}\n"
        rank = other
    ring = list(lines)[list(lines).index(rank) :]
    return (
        f"ranks wait for each other forever:\n{''.join(lines[member] for member in ring)}change the order of the "
        f"tasks on one of them"
    )
