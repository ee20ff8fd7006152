"""When the buffers of messages may be used again, and how much memory that leaves in use.

A *send buffer* is free at the later of

(a) the end of its last local reader: the send itself, and where forwards are run again, the backward that does so;
(b) the first local computation that can only happen after the matching receive: nothing earlier tells a rank that its message
    has arrived.

For 1F1B this is what PaddlePaddle's pull requests 34086 and 34230 found for each direction: a forward's buffer is free when
the gradient of the same micro-batch has come, a backward's two steps later. With it memory does not grow with the number of
micro-batches; a backward's buffer that is kept to the end of the step costs one boundary tensor for each.

A *receive buffer* is in use from the slot that launches the receive to the end of its last reader.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import replace

import numpy as np

from autopar.pipeline.dataflow import reader, target
from autopar.pipeline.schedule import PipelineSchedule
from autopar.pipeline.task import Task

NEVER = np.iinfo(np.int32).max


class Flow:
    """The order in which a schedule's computations must happen, whatever time they take.

    Attributes:
        orders: the computations of each rank, in its order.
        place: of each, its rank and its number in that order.
        time: of each, the row of its slot.
        sends: all of them.
    """

    def __init__(self, schedule: PipelineSchedule) -> None:
        self.schedule = schedule
        self.orders: list[list[Task]] = [[] for _ in range(schedule.ranks)]
        self.place: dict[Task, tuple[int, int]] = {}
        self.time: dict[Task, int] = {}
        self.sends: list[Task] = []
        for time, rank, task in schedule.tasks():
            if task.kind[1] == "W":
                self.place[task] = rank, len(self.orders[rank])
                self.time[task] = time
                self.orders[rank].append(task)
            elif task.kind[1] == "S":
                self.sends.append(task)

    def first_after(self) -> list[np.ndarray]:
        """Of each rank a table ``[number][rank]``: the first computation there that happens at the earliest after that one.

        Program order and messages are followed; ``NEVER`` where there is none. Linear in computations x ranks.
        """
        schedule, ranks = self.schedule, len(self.orders)
        after = [np.full((len(own) + 1, ranks), NEVER, np.int32) for own in self.orders]
        for task in reversed(self.place):  # rows are in an order in which everything comes after what it reads
            rank, number = self.place[task]
            own = after[rank]
            if (send := target(task, schedule.rank_of)) is not None and (read := self.place.get(reader(send))) is not None:
                np.minimum(own[number + 1], after[read[0]][read[1]], out=own[number])
            else:
                own[number] = own[number + 1]
            own[number, rank] = number
        return after


def release_points(flow: Flow) -> dict[Task, int]:
    """Of each send, the number of the computation on its rank before which its buffer is free by rule (b); or ``NEVER``."""
    after = flow.first_after()
    found: dict[Task, int] = {}
    for send in flow.sends:
        if (place := flow.place.get(reader(send))) is not None:
            rank, number = place
            found[send] = int(after[rank][number, flow.schedule.rank_of[send.stage]])
    return found


def last_readers(send: Task, schedule: PipelineSchedule) -> tuple[Task, ...]:
    """The local computations that read a send buffer after it was made: rule (a)."""
    return (Task("BW", send.stage, send.batch),) if schedule.recompute and send.kind[0] == "F" else ()


def with_frees(schedule: PipelineSchedule) -> PipelineSchedule:
    """The schedule in which the first slot that may release a send buffer does; what is free at the end only stays."""
    schedule = schedule.with_messages()
    flow = Flow(schedule)
    first: list[list[int]] = [[] for _ in range(schedule.ranks)]  # of each slot that computes, its first computation
    times: list[list[int]] = [[] for _ in range(schedule.ranks)]
    for rank, own in enumerate(flow.orders):
        for number, task in enumerate(own):
            if not times[rank] or flow.time[task] != times[rank][-1]:
                first[rank].append(number)
                times[rank].append(flow.time[task])
    free: dict[tuple[int, int], list[Task]] = defaultdict(list)
    for send, number in release_points(flow).items():
        rank = schedule.rank_of[send.stage]
        for one in last_readers(send, schedule):
            number = max(number, flow.place[one][1] + 1) if one in flow.place else number
        if (slot := bisect_left(first[rank], number)) < len(first[rank]):
            free[times[rank][slot], rank].append(send)
    table = [
        tuple(replace(slot, free=tuple(free[time, rank])) if (time, rank) in free else slot for rank, slot in enumerate(row))
        for time, row in enumerate(schedule.slots)
    ]
    return replace(schedule, slots=tuple(table)).known_right()
