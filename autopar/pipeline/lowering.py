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

from collections.abc import Sequence
from dataclasses import replace

from autopar.pipeline.buffers import first_releases
from autopar.pipeline.dataflow import made_by, source
from autopar.pipeline.schedule_table import Schedule, ScheduleTable
from autopar.pipeline.task import EMPTY, REDUCE, Row, Slot, Task, other_end, placed
from autopar.pipeline.verify import checked

Receives = list[Task]  # the messages of one row, by their receives


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
    schedule = checked(with_messages(schedule))
    free = first_releases(schedule)
    table = [list(row) for row in schedule.slots]
    for time, rank, slot in placed(schedule.slots):
        if slot.free or (time, rank) in free:
            table[time][rank] = replace(slot, free=tuple(free.get((time, rank), ())))
    return replace(schedule, slots=tuple(map(tuple, table))).known_right()


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
    made: dict[Task, int] = {}
    behind: list[list[Receives]] = [[] for _ in table]  # the rows of messages after each row of computations
    for time, row in enumerate(table):
        if latest and time:
            behind[time - 1].append([])
        for receive in (source(task, schedule.rank_of) for slot in row for task in slot.tasks):
            if receive is not None and (sent := made.get(made_by(other_end(receive)))) is not None:
                _message_row(receive, behind[sent : time if latest else sent + 1], latest).append(receive)
        made.update((task, time) for slot in row for task in slot.tasks)
    lowered: list[Row] = []
    for row, receives_of_rows in zip(table, behind, strict=True):
        lowered.append(tuple(row))
        lowered += (_slots(receives if latest else sorted(receives), schedule) for receives in receives_of_rows)
    return replace(schedule, slots=tuple(lowered))


def _message_row(receive: Task, behind: Sequence[list[Receives]], latest: bool) -> Receives:
    """Return the newest row in which no other message leaves that stage or arrives at this; else a new row.

    Unless ``latest``, it is the one row after the computation.
    """
    for receives in (receives for rows in reversed(behind) for receives in reversed(rows)):
        if not latest or not any(other.peer == receive.peer or other.stage == receive.stage for other in receives):
            return receives
    behind[-1].append([])
    return behind[-1][-1]


def _slots(receives: Receives, schedule: ScheduleTable) -> Row:
    """Return a row with both ends of messages."""
    tasks: list[list[Task]] = [[] for _ in range(schedule.ranks)]
    for receive in receives:
        tasks[schedule.rank_of[receive.peer]].append(other_end(receive))
        tasks[schedule.rank_of[receive.stage]].append(receive)
    return tuple(Slot(tuple(own)) if own else EMPTY for own in tasks)


def _add_reductions(table: list[list[Slot]], schedule: ScheduleTable) -> None:
    """Add a reduction after the last gradient of each stage, unless the table has one."""
    reduced_stages = {stage for _, _, slot in placed(table) for name, stage in slot.parameters if name == REDUCE}
    last = {task.stage: time for time, _, slot in placed(table) for task in slot.tasks if task.kind != "FW"}
    for stage, time in sorted(last.items()):
        if stage not in reduced_stages:
            rank = schedule.rank_of[stage]
            slot = table[time][rank]
            table[time][rank] = replace(slot, parameters=(*slot.parameters, (REDUCE, stage)))
