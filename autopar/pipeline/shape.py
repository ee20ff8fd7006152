"""Check the shape of a table: slots of tasks, rows of one width, existing stages and micro-batches.

Even an invalid schedule has this shape.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from autopar.errors import ScheduleError, shown
from autopar.pipeline.task import KINDS, Slot, Table, Task, placed


def whole(value: Any, label: str) -> int:
    """Return a whole number as an int; NumPy's are accepted too.

    Raises:
        TypeError: the value is not a whole number, or is a bool.
    """
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{label} is a whole number, not {shown(value)}")


def counts(of: str, **numbers: object) -> list[int]:
    """Return whole numbers from 1 on, such as ``ranks=4``.

    Raises:
        TypeError: one is not a whole number.
        ScheduleError: one is less than 1.
    """
    checked = {name: whole(number, f"{of}: {name}") for name, number in numbers.items()}
    for name, number in checked.items():
        if number < 1:
            raise ScheduleError(f"{of}: {name}={number}; there is at least one")
    return [*checked.values()]


def placement(rank_of: Any) -> tuple[int, ...]:
    """Return the rank of each stage as a tuple, from any iterable."""
    if isinstance(rank_of, (str, bytes)) or not isinstance(rank_of, Iterable):
        raise TypeError(f"rank_of is the rank of each stage, such as (0, 1, 1, 0), not {shown(rank_of)}")
    ranks = tuple(whole(rank, "a rank in rank_of") for rank in rank_of)
    if not ranks:
        raise ScheduleError("a schedule has at least one stage")
    if sorted(set(ranks)) != list(range(max(ranks) + 1)):
        raise ScheduleError(f"the stages are on ranks {sorted(set(ranks))}: number the ranks from 0 without gaps")
    return ranks


def stages_of(rank_of: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank, in increasing order."""
    stages: list[list[int]] = [[] for _ in range(max(rank_of) + 1)]
    for stage, rank in enumerate(rank_of):
        stages[rank].append(stage)
    return tuple(map(tuple, stages))


def table(slots: Iterable[Iterable[Slot]], batches: int, rank_of: tuple[int, ...]) -> Table:
    """Return the rows as tuples, after checking that each slot belongs to its rank."""
    if batches < 1:
        raise ScheduleError(f"a schedule has at least one micro-batch, not {batches}")
    rows = tuple(row if type(row) is tuple else tuple(row) for row in slots)
    ranks, stages = max(rank_of) + 1, len(rank_of)
    for time, row in enumerate(rows):
        if len(row) != ranks:
            raise ScheduleError(f"row {time} has {len(row)} slots, but there are {ranks} ranks")
    for time, rank, slot in placed(rows):
        if type(slot) is not Slot or not all(type(own) is tuple for own in (slot.tasks, slot.free, slot.parameters)):
            raise TypeError(f"row {time}, rank {rank}: this must be a Slot with tuples of tasks, not {shown(slot)}")
        for task in slot.tasks:
            if type(task) is not Task or task.kind not in KINDS:
                wrong = f"{shown(task)} is no task; a Task has one of the kinds {', '.join(sorted(KINDS))}"
            elif not 0 <= task.stage < stages:
                wrong = f"{task.where}: there is no stage {task.stage}, only 0 to {stages - 1}"
            elif not 0 <= task.batch < batches:
                wrong = f"{task.where}: there is no micro-batch {task.batch}, only 0 to {batches - 1}"
            elif rank_of[task.stage] != rank:
                wrong = f"{task.where}, but that stage is on rank {rank_of[task.stage]}"
            else:
                continue
            raise ScheduleError(f"row {time}, rank {rank}: {wrong}")
        for send in slot.free:
            if (
                type(send) is not Task
                or send.kind not in KINDS
                or not (0 <= send.stage < stages and 0 <= send.peer < stages)
            ):
                raise ScheduleError(
                    f"row {time}, rank {rank}: the buffer of {send!r} is released, but that is no send between "
                    f"two stages"
                )
        for pair in slot.parameters:
            if type(pair) is not tuple or len(pair) != 2:
                raise ScheduleError(
                    f"row {time}, rank {rank}: {pair!r} among the parameters must be a name and a stage, such as "
                    f"('REDUCE_GRAD', 0)"
                )
    return rows
