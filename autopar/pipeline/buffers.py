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
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autopar.pipeline.dataflow import made_by, reader
from autopar.pipeline.schedule_table import ScheduleTable
from autopar.pipeline.task import Task, other_end, placed

NEVER = np.iinfo(np.int32).max
Releases = Mapping[tuple[int, int], Sequence[Task]]


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
        for time, rank, slot in placed(schedule.slots):
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


def releases(schedule: ScheduleTable) -> Releases:
    """Return (row, rank) → the sends whose buffers that slot releases: as it says, or as soon as the rules allow it.

    Buffers in use to the end are left out.
    """
    stated: Releases = {(time, rank): slot.free for time, rank, slot in placed(schedule.slots) if slot.free}
    return stated or first_releases(schedule)


def first_releases(schedule: ScheduleTable) -> Releases:
    """Return (row, rank) → the sends whose buffers that slot is the first that may release, in a valid schedule."""
    flow = Flow(schedule)
    free: dict[tuple[int, int], list[Task]] = defaultdict(list)
    for send, row in release_rows(flow).items():
        rank = schedule.rank_of[send.stage]
        busy = flow.busy[rank]
        if (slot := bisect_left(busy, row)) < len(busy):
            free[busy[slot], rank].append(send)
    return free


class Use(NamedTuple):
    """Something that comes into use, or goes out of use.

    Attributes:
        time, rank: the slot.
        task: the computation at which it happens; ``None`` when the slot begins.
        what: a message, for its buffer; or the computation, for what it keeps.
        change: 1, or at the end of the computation or for a buffer that is released -1.
    """

    time: int
    rank: int
    task: Task | None
    what: Task
    change: int


def uses(schedule: ScheduleTable, free: Releases, *, pooled: bool = False) -> Iterator[Use]:
    """Yield what comes into use and goes out of use, in the order of the slots.

    Args:
        free: when send buffers are released; see ``releases``.
        pooled: whether receive buffers are in use to the last pass of their micro-batch, and not to their last reader.
    """
    sends: dict[Task, Task] = {}
    read: dict[Task, list[Task]] = defaultdict(list)  # last reader → receives
    last = "WW" if schedule.is_split else "BW"
    readers = {"FR": last if pooled else "BW" if schedule.recompute else "FW", "BR": last}
    for _, _, task in schedule.tasks():
        if task.kind[1] == "S":
            sends[made_by(task)] = task
        elif task.kind[1] == "R":
            read[Task(readers[task.kind], task.stage, task.batch)].append(task)
    for time, rank, slot in placed(schedule.slots):
        yield from (Use(time, rank, None, send, -1) for send in free.get((time, rank), ()))
        yield from (Use(time, rank, None, receive, 1) for receive in slot.receive)
        for task in slot.compute:
            yield Use(time, rank, task, task, 1)
            if (send := sends.get(task)) is not None:
                yield Use(time, rank, task, send, 1)
            yield from (Use(time, rank, task, receive, -1) for receive in read.get(task, ()))
            yield Use(time, rank, task, task, -1)


def in_use(schedule: ScheduleTable) -> dict[tuple[int, int], tuple[int, int]]:
    """Return (sender, receiver) → the most send buffers and the most receive buffers in use at once.

    The schedule must be valid and have messages.
    """
    now: Counter[tuple[str, tuple[int, int]]] = Counter()
    most = dict(now)
    for _, _, _, what, change in uses(schedule, releases(schedule)):
        if (end := what.kind[1]) != "W":
            send = what if end == "S" else other_end(what)
            key = end, (schedule.rank_of[send.stage], schedule.rank_of[send.peer])
            now[key] += change
            most[key] = max(now[key], most.get(key, 0))
    return {ranks: (most["S", ranks], most["R", ranks]) for end, ranks in most if end == "S"}
