"""Decide when the buffers of messages may be used again, and count how many are in use at once.

A *send buffer* is free at the later of

(a) the end of its last local reader: the send itself, or with recomputation the backward that runs the forward again;
(b) the first local computation that can only happen after the matching receive: only then does the rank know that its
message
    has arrived.

For 1F1B this is what PaddlePaddle's pull requests 34086 and 34230 found for each direction: a forward's buffer is free
when the gradient of the same micro-batch has come, a backward's two steps later. With it memory does not grow with the
number of micro-batches; a backward's buffer that is kept to the end of the step costs one boundary tensor for each.

A *receive buffer* is in use from the slot that launches the receive to the end of its last reader.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from autopar.pipeline.dataflow import made_by, reader
from autopar.pipeline.schedule_table import Schedule, ScheduleTable
from autopar.pipeline.task import Task

NEVER = np.iinfo(np.int32).max


class Flow:
    """The order in which a schedule's computations must happen, whatever time they take.

    Attributes:
        rows: the row of each computation, rank by rank, in their order.
        place: computation → its rank and its number on that rank.
        sends: send → the number of the newest computation before it on its rank, or -1, and its row.
        readers: send → the place of the computation that reads it on another rank.
        busy: the rows in which each rank has tasks.
    """

    def __init__(self, schedule: ScheduleTable) -> None:
        self.schedule = schedule
        self.rows: list[list[int]] = [[] for _ in range(schedule.ranks)]
        self.place: dict[Task, tuple[int, int]] = {}
        self.sends: dict[Task, tuple[int, int]] = {}
        self.busy: list[list[int]] = [[] for _ in range(schedule.ranks)]
        for time, row in enumerate(schedule.slots):
            for rank, slot in enumerate(row):
                if slot.tasks:
                    self.busy[rank].append(time)
                    rank_rows = self.rows[rank]
                    before = len(rank_rows) - 1
                    for task in slot.tasks:
                        if task.kind[1] == "W":
                            self.place[task] = rank, len(rank_rows)
                            rank_rows.append(time)
                        elif task.kind[1] == "S":
                            self.sends[task] = before, time
        self.readers = {send: place for send in self.sends if (place := self.place.get(reader(send))) is not None}

    def first_after(self) -> list[np.ndarray]:
        """Return for each rank a table ``[number][rank]`` of first computations of the other rank.

        An entry is the first computation of the other rank that must happen after that computation of this rank.
        Program order and messages count; ``NEVER`` if there is no such computation. Linear in computations x ranks.
        """
        ranks = len(self.rows)
        after = [np.full((len(rank_after) + 1, ranks), NEVER, np.int32) for rank_after in self.rows]
        readers: list[dict[int, list[tuple[int, int]]]] = [defaultdict(list) for _ in self.rows]
        for send, place in self.readers.items():  # messages sent after a computation and before the next
            readers[self.schedule.rank_of[send.stage]][self.sends[send][0]].append(place)
        # in the order of rows every computation comes after those it reads
        for rank, number in reversed(self.place.values()):
            rank_after = after[rank]
            earliest = rank_after[number]
            earliest[:] = rank_after[number + 1]
            if number in readers[rank]:
                for other, read in readers[rank][number]:
                    np.minimum(earliest, after[other][read], out=earliest)
            earliest[rank] = number
        return after


def release_points(flow: Flow) -> dict[Task, int]:
    """Return for each send the computation before which its buffer is free by rule (b), or ``NEVER``.

    It is a number on the sending rank.
    """
    after, rank_of = flow.first_after(), flow.schedule.rank_of
    return {send: int(after[rank][number, rank_of[send.stage]]) for send, (rank, number) in flow.readers.items()}


def last_readers(send: Task, schedule: ScheduleTable) -> tuple[Task, ...]:
    """Return the local computations that read a send buffer besides the send itself: rule (a)."""
    return (Task("BW", send.stage, send.batch),) if schedule.recompute and send.kind[0] == "F" else ()


def release_rows(flow: Flow) -> dict[Task, int]:
    """Return for each send the first row whose slot of its rank may release the buffer, or ``NEVER``.

    Both rules must allow it. A slot that computes has waited for the messages that its first computation reads. A slot
    of messages alone waits for nothing.
    """
    first: dict[Task, int] = {}
    for send, number in release_points(flow).items():
        if number == NEVER:
            first[send] = NEVER
            continue
        computed = flow.rows[flow.schedule.rank_of[send.stage]]
        row = computed[number]
        if number and computed[number - 1] == row:
            row += 1
        row = max(row, flow.sends[send][1] + 1)
        for task in last_readers(send, flow.schedule):
            if (place := flow.place.get(task)) is not None:
                row = max(row, computed[place[1]] + 1)
        first[send] = row
    return first


def releases(schedule: ScheduleTable) -> dict[tuple[int, int], list[Task]]:
    """Return (row, rank) → the sends whose buffers that slot is the first to release.

    Buffers in use to the end are left out.
    """
    flow = Flow(schedule)
    free: dict[tuple[int, int], list[Task]] = defaultdict(list)
    for send, row in release_rows(flow).items():
        rank = schedule.rank_of[send.stage]
        busy = flow.busy[rank]
        if (slot := bisect_left(busy, row)) < len(busy):
            free[busy[slot], rank].append(send)
    return free


def add_releases(schedule: Schedule) -> Schedule:
    """Return the schedule in which the first slot that may release a send buffer does so.

    The schedule must be valid and have messages.
    """
    free = releases(schedule)
    table = tuple(
        tuple(
            replace(slot, free=tuple(free[time, rank])) if (time, rank) in free or slot.free else slot
            for rank, slot in enumerate(row)
        )
        for time, row in enumerate(schedule.slots)
    )
    return replace(schedule, slots=table).known_right()


def in_use(schedule: ScheduleTable) -> dict[tuple[int, int], tuple[int, int]]:
    """Return (sender, receiver) → the most send buffers and the most receive buffers in use at once.

    The schedule must be valid and have messages.
    """
    if not any(slot.free for row in schedule.slots for slot in row):
        schedule = add_releases(schedule)
    now: dict[tuple[str, tuple[int, int]], int] = defaultdict(int)
    most = dict(now)
    for end, change, ranks in _taken(schedule):
        now[end, ranks] += change
        most[end, ranks] = max(now[end, ranks], most.get((end, ranks), 0))
    return {ranks: (most["S", ranks], most["R", ranks]) for end, ranks in most if end == "S"}


def _taken(schedule: ScheduleTable) -> Iterator[tuple[str, int, tuple[int, int]]]:
    """Yield each allocation (1) and release (-1) of a buffer, in the order of the slots.

    With it come S (send) or R (receive), and the two ranks.
    """
    rank_of = schedule.rank_of
    sends: dict[Task, Task] = {}
    read: dict[Task, list[Task]] = defaultdict(list)  # last reader → receives
    for _, _, task in schedule.tasks():
        if task.kind[1] == "S":
            sends[made_by(task)] = task
        elif task.kind[1] == "R":
            kind = (
                ("BW" if schedule.recompute else "FW") if task.kind == "FR" else ("WW" if schedule.is_split else "BW")
            )
            read[Task(kind, task.stage, task.batch)].append(task)
    for row in schedule.slots:
        for slot in row:
            yield from (("S", -1, (rank_of[send.stage], rank_of[send.peer])) for send in slot.free)
            yield from (("R", 1, (rank_of[receive.peer], rank_of[receive.stage])) for receive in slot.receive)
            for task in slot.compute:
                if (send := sends.get(task)) is not None:
                    yield "S", 1, (rank_of[send.stage], rank_of[send.peer])
                yield from (("R", -1, (rank_of[receive.peer], rank_of[receive.stage])) for receive in read[task])
