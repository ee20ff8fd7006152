"""Lower a table of computations: add its messages.

*Before*: rows of computations. *After*: between them rows of messages, with send and receive of each message in one
row, and a reduction after the last gradient of each stage.

    FW00                        FW00    FS00    FW01
            FW00        →               FR00    FW00

Both ends of a message are in one row, and that row comes after the row of the computation that makes it. So the rows
are one order of all messages, which each rank keeps; a rank launches the messages of a row in an order that all ranks
share. Therefore the ranks finish even if every send waits for its receive, and the i-th send from one rank to another
is the i-th received.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from autopar.pipeline.buffers import add_releases
from autopar.pipeline.dataflow import source
from autopar.pipeline.schedule_table import Schedule, ScheduleTable
from autopar.pipeline.task import EMPTY, REDUCE, Slot, Table, Task, other_end
from autopar.pipeline.verify import checked

Messages = dict[int, list[Task]]  # rank → its messages of one row


def with_messages(schedule: Schedule, *, latest: bool = False) -> Schedule:
    """Return the schedule with its messages, verified; the same object if it has them.

    Args:
        latest: as for ``lower``.

    Raises:
        ScheduleError: the schedule is invalid.
    """
    return schedule if schedule.has_messages else lower(checked(schedule), latest=latest).known_right()


def with_frees(schedule: Schedule) -> Schedule:
    """Return the schedule with messages, in which the first possible slot releases each send buffer.

    Raises:
        ScheduleError: the schedule is invalid.
    """
    return add_releases(checked(with_messages(schedule)))


def lower(schedule: Schedule, *, latest: bool = False) -> Schedule:
    """Return the schedule with its messages, without verifying it.

    Args:
        latest: put a message into the last row before its reader, with one message to and one from a stage in each row,
            as ONNX Runtime does (pull request 4524); there is then a row of messages, empty or not, between any two
            rows of computations. Otherwise a message is in the first row after the computation that makes it, so that
            it travels while its receiver computes.
    """
    table = [[Slot(slot.compute, parameters=slot.parameters) for slot in row] for row in schedule.slots]
    _add_reductions(table, schedule)
    lowered = _latest(table, schedule.rank_of) if latest else _earliest(table, schedule.rank_of)
    return replace(schedule, slots=lowered)


def _add_reductions(table: list[list[Slot]], schedule: ScheduleTable) -> None:
    """Add a reduction after the last gradient of each stage, unless the table has one."""
    reduced_stages = {stage for row in table for slot in row for name, stage in slot.parameters if name == REDUCE}
    last: dict[int, int] = {}
    for time, row in enumerate(table):
        for slot in row:
            last.update((task.stage, time) for task in slot.tasks if task.kind != "FW")
    for stage, time in sorted(last.items()):
        if stage not in reduced_stages:
            rank = schedule.rank_of[stage]
            slot = table[time][rank]
            table[time][rank] = replace(slot, parameters=(*slot.parameters, (REDUCE, stage)))


def _earliest(table: Sequence[Sequence[Slot]], rank_of: Sequence[int]) -> Table:
    after: dict[int, list[Task]] = defaultdict(list)
    made = {task: time for time, row in enumerate(table) for slot in row for task in slot.tasks}
    for row in table:
        for slot in row:
            for task in slot.tasks:
                if (message := source(task, rank_of)) is not None:
                    producer = Task(message.kind[0] + "W", message.peer, message.batch)
                    if producer in made:
                        after[made[producer]].append(message)
    lowered = []
    for time, row in enumerate(table):
        lowered.append(tuple(row))
        if time in after:
            messages: Messages = {}
            for receive in sorted(after[time]):
                messages.setdefault(rank_of[receive.peer], []).append(other_end(receive))
                messages.setdefault(rank_of[receive.stage], []).append(receive)
            lowered.append(_row(messages, len(row)))
    return tuple(lowered)


def _latest(table: Sequence[Sequence[Slot]], rank_of: Sequence[int]) -> Table:
    lowered: list[tuple[Slot, ...] | Messages] = []
    made: dict[Task, int] = {}
    width = 0
    for row in table:
        width = len(row)
        if lowered:
            lowered.append({})
        for slot in row:
            for task in slot.tasks:
                if (message := source(task, rank_of)) is not None:
                    producer = Task(message.kind[0] + "W", message.peer, message.batch)
                    if producer in made:
                        place = _free_row(lowered, made[producer], message)
                        place.setdefault(rank_of[message.peer], []).append(other_end(message))
                        place.setdefault(rank_of[message.stage], []).append(message)
        made.update((task, len(lowered)) for slot in row for task in slot.tasks)
        lowered.append(tuple(row))
    return tuple(_row(row, width) if isinstance(row, dict) else row for row in lowered)


def _free_row(lowered: list[tuple[Slot, ...] | Messages], after: int, receive: Task) -> Messages:
    """Return the newest row in which no other message leaves that stage or arrives at this; else a new row."""
    for time in range(len(lowered) - 1, after, -1):
        row = lowered[time]
        if isinstance(row, dict) and not any(
            (task.kind[1] == "R" and task.peer == receive.peer) or (task.kind[1] == "S" and task.peer == receive.stage)
            for messages in row.values() for task in messages
        ):  # fmt: skip
            return row
    new: Messages = {}
    lowered.append(new)
    return new


def _row(messages: Messages, width: int) -> tuple[Slot, ...]:
    return tuple(Slot(tuple(messages[rank])) if rank in messages else EMPTY for rank in range(width))
