"""Print a schedule as a text table of fixed width.

Each rank has a line, and time runs along it. A slot looks as ONNX Runtime prints it (pull request 4524): eight
characters for up to two tasks, and nothing between slots.

    FW00    FS00    FW01            BR00    BW00
            FR00    FW00    BW00    BS00

If that is too narrow, every task is written with all digits of its micro-batch and with its chunk, ``FW003.1``.
"""

from __future__ import annotations

from autopar.pipeline.schedule_table import ScheduleTable
from autopar.pipeline.task import Slot, Table, Task

TASKS, DIGITS = 2, 2  # tasks of a slot, digits of a micro-batch


def table(schedule: ScheduleTable, rows: Table, *, events: bool = False, down: bool = False) -> str:
    """Return the table, without a line end after its last line.

    Args:
        rows: the ``compute_comm_table`` or the ``compute_table`` of the schedule.
        events: print after the tasks of a slot the events that it waits for and those that it records, ``-1>0``.
        down: print time downwards, with a column for each rank and numbered rows.
    """
    most = max([TASKS, *(len(slot.tasks) for row in rows for slot in row)])
    digits = max(DIGITS, len(str(schedule.batches - 1)))
    chunks = len(str(schedule.chunks - 1)) if schedule.chunks > 1 else 0
    width = most * (2 + digits + (chunks and 1 + chunks))

    def task_text(task: Task) -> str:
        return f"{task.kind}{task.batch:0{digits}d}" + (
            f".{schedule.chunk_of(task.stage):0{chunks}d}" if chunks else ""
        )

    def slot_text(slot: Slot) -> str:
        tasks = "".join(map(task_text, slot.tasks))
        if events and slot.tasks:
            return f"{tasks:{width}} {','.join(map(str, slot.waits))}>{','.join(map(str, slot.records))}"
        return tasks

    fits = most == TASKS and digits == DIGITS and not chunks and not events
    texts = [[slot_text(slot) for slot in row] for row in rows]
    width = max([width, *(len(text) for row in texts for text in row)])
    if down:
        return _down(texts, schedule.ranks, width)
    return "\n".join(
        ("" if fits else " ").join(f"{row[rank]:{width}}" for row in texts) for rank in range(schedule.ranks)
    )


def _down(texts: list[list[str]], ranks: int, width: int) -> str:
    heads = [f"rank {rank}" for rank in range(ranks)]
    width = max([width, *map(len, heads)])
    first = max(len("time"), len(str(len(texts) - 1)))
    lines = [("time", heads), *((str(time), row) for time, row in enumerate(texts))]
    return "\n".join(
        "  ".join([f"{time:>{first}}", *(f"{text:{width}}" for text in row)]).rstrip() for time, row in lines
    )
