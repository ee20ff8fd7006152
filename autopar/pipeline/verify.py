"""Verify a schedule, also one that was loaded: check the rules that every schedule must keep.

The verifier reads only the table and runs nothing. It is linear in the tasks, and for the release of buffers in tasks x
ranks. Messages have no tags and do not overtake each other, so the i-th send from one rank to another must be the i-th
receive; ``autopar.verify.channels`` decides on which channels all ranks finish.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic

from autopar.errors import ChannelError, ScheduleError, shown
from autopar.gc_pause import gc_paused
from autopar.pipeline.buffers import NEVER, Flow, in_use, last_readers, release_rows
from autopar.pipeline.dataflow import made_by, reads, source
from autopar.pipeline.schedule_table import Schedule, ScheduleTable
from autopar.pipeline.task import ON_PARAMETERS, REDUCE, RESHARD, UNSHARD, Task, other_end, placed
from autopar.verify.channels import ALL, ASYNCHRONOUS, Channels, Group, Receive, Send
from autopar.verify.channels.check import check_tasks


@dataclass(frozen=True)
class Verification(Generic[Schedule]):
    """The result of the verifier for a valid schedule.

    Attributes:
        computations, messages: how many there are.
        finishes: kind of channels → an empty text if all ranks finish on them, else the cycle of ranks that wait.
        buffers: (sender, receiver) → the most send buffers and the most receive buffers in use at once.
    """

    schedule: Schedule
    computations: int
    messages: int
    finishes: dict[str, str]
    buffers: dict[tuple[int, int], tuple[int, int]]

    def __str__(self) -> str:
        good = [name for name, cycle in self.finishes.items() if not cycle]
        lines = [
            f"{self.computations} computations, {self.messages} messages; finishes on {', '.join(good) or 'no'} "
            f"channels"
        ]
        lines += [f"on {name} channels {cycle}" for name, cycle in self.finishes.items() if cycle]
        lines += [
            f"  rank {u} → rank {v}: at most {sent} send and {received} receive buffers"
            for (u, v), (sent, received) in sorted(self.buffers.items())
        ]
        return "\n".join(lines)


@gc_paused()
def verify(schedule: Schedule, *, channels: Iterable[Channels] = ()) -> Verification[Schedule]:
    """Check a schedule with messages, or one of computations alone.

    The verifier assumes that a rank waits at each receive before it goes on. A schedule that finishes this way also
    finishes if only the reader of a message waits for it.

    Args:
        channels: channels on which all ranks must finish, besides asynchronous ones. The result names the others on
            which they do.

    Raises:
        ScheduleError: a task is missing, doubled, or before a task that it reads; a message has only one end, has no
            reader, or is not received in the order in which it was sent; ranks wait for each other forever; a buffer
            is released too early; gradients are not reduced; parameters are used before they are gathered, gathered
            twice, or freed twice.
    """
    times = _once(schedule)
    _order(schedule)
    finishes: dict[str, str] = {}
    buffers: dict[tuple[int, int], tuple[int, int]] = {}
    messages = sum(task.kind[1] == "S" for task in times)
    if schedule.has_messages:
        _pairing(schedule, times)
        finishes = _progress(schedule, times, channels)
        _reductions(schedule, times)
        _gathered(schedule)
    _releases(schedule, times)
    if messages:
        buffers = in_use(schedule.known_right())
    return Verification(schedule, sum(task.kind[1] == "W" for task in times), messages, finishes, buffers)


def checked(schedule: Schedule) -> Schedule:
    """Verify a schedule that is not known to be valid, and return it.

    Raises:
        ScheduleError: the schedule is invalid.
    """
    if not schedule.is_known_right:
        verify(schedule)
    return schedule.known_right()


def _once(schedule: ScheduleTable) -> dict[Task, int]:
    """Check that every pass of every micro-batch occurs once; return the row of each task."""
    times: dict[Task, int] = {}
    tasks: dict[tuple[str, int, int], Task] = {}
    for time, rank, task in schedule.tasks():
        if (other := tasks.setdefault(task[:3], task)) is not task or task in times:
            raise ScheduleError(
                f"{task.where} is there twice: in row {times[other]} and in row {time} of rank {rank}; leave one out"
            )
        times[task] = time
    split = any(task.kind == "WW" for task in times)
    for stage in range(schedule.stages):
        for batch in range(schedule.batches):
            for kind in ("FW", "BW", "WW") if split else ("FW", "BW"):
                if (task := Task(kind, stage, batch)) not in times:
                    others = "; other micro-batches have theirs" if kind == "WW" else ""
                    raise ScheduleError(f"{task.where} is missing on rank {schedule.rank_of[stage]}{others}: add it")
    return times


def _order(schedule: ScheduleTable) -> None:
    """Check that every task comes after the tasks whose results it reads."""
    place = {task: (time, i) for time, _, slot in placed(schedule.slots) for i, task in enumerate(slot.tasks)}
    rank_of = schedule.rank_of
    for task, (time, i) in place.items():
        action = task.kind[1]
        if action == "W":
            needed: Iterable[Task] = reads(task, schedule.stages)
        else:
            needed = (made_by(task),) if action == "S" else ()
        for need in needed:
            same_rank = rank_of[need.stage] == rank_of[task.stage]
            before, j = place[need]
            if not (before < time or (same_rank and action == "W" and (before, j) < (time, i))):
                raise ScheduleError(
                    f"{task.where} comes before the task that it "
                    f"reads:\n{_at(task, time, rank_of)}{_at(need, before, rank_of)}put {need} into an earlier row "
                    f"than {task}"
                )


def _at(task: Task, time: int, rank_of: tuple[int, ...]) -> str:
    return f"  row {time}, rank {rank_of[task.stage]}: {task.where}\n"


def _pairing(schedule: ScheduleTable, times: dict[Task, int]) -> None:
    """Check that each result that another rank reads has one send and one receive, and nothing else is sent.

    The receive comes before the reader.
    """
    rank_of = schedule.rank_of
    computations = (task for task in times if task.kind[1] == "W")
    expected = {receive: task for task in computations if (receive := source(task, rank_of)) is not None}
    messages = [task for task in times if task.kind[1] != "W"]
    for task in messages:
        if (task if task.kind[1] == "R" else other_end(task)) not in expected:
            peer = task.stage + (1 if (task.kind[0] == "F") == (task.kind[1] == "S") else -1)
            if task.peer == peer:
                known = f"stages {task.stage} and {peer} are on one rank, {rank_of[task.stage]}"
            elif 0 <= peer < schedule.stages:
                known = f"its peer is stage {peer}"
            else:
                known = f"stage {task.stage} has none there"
            where = _at(task, times[task], rank_of)
            raise ScheduleError(f"nobody needs this message:\n{where}{known}; leave it out")
    for task in messages:
        if other_end(task) not in times:
            raise ScheduleError(
                f"a message has one end only:\n{_at(task, times[task], rank_of)}add {other_end(task).where} on rank "
                f"{rank_of[task.peer]}"
            )
    for receive, use in expected.items():
        if receive not in times:
            raise ScheduleError(
                f"a result does not get to its reader:\n{_at(use, times[use], rank_of)}add {receive.where}, and its "
                f"send"
            )
        send = other_end(receive)
        for message in (receive, send):
            if times[message] >= times[use]:
                raise ScheduleError(
                    f"a message comes after its "
                    f"use:\n{_at(message, times[message], rank_of)}{_at(use, times[use], rank_of)}put {message} into "
                    f"an earlier row"
                )


def _progress(schedule: ScheduleTable, times: dict[Task, int], channels: Iterable[Channels]) -> dict[str, str]:
    """Check that each pair of ranks sends and receives in one order.

    Return for each kind of channels whether all ranks finish.
    """
    tasks: dict[int, list[Group]] = {rank: [] for rank in range(schedule.ranks)}
    for _, rank, slot in placed(schedule.slots):
        if messages := slot.messages:
            tasks[rank].append(Group(tuple(_message(task, schedule) for task in messages)))

    @functools.cache
    def lines() -> dict[tuple[int, str], str]:
        return {
            (schedule.rank_of[task.stage], _value(task)): f"row {time}: {task.where}"
            for task, time in times.items()
            if task.kind[1] != "W"
        }

    def refused(model: Channels) -> str:
        try:
            check_tasks(tasks, [model], lambda rank, value: lines().get((rank, value), ""))
        except ChannelError as error:
            return str(error)
        return ""

    finishes: dict[str, str] = {}
    required = (ASYNCHRONOUS, *channels)  # all channels refuse a wrong order
    for model in required:
        if not isinstance(model, Channels):
            raise TypeError(
                f"channels are those of autopar.verify.channels: ASYNCHRONOUS, buffered(k), GROUPED, BLOCKING; not "
                f"{shown(model)}"
            )
    tried = {*ALL, *required}
    for model in sorted(tried, key=lambda model: model.strictness, reverse=True):
        looser = any(not finishes[other.name] and model.looser(other) for other in tried if other.name in finishes)
        finishes[model.name] = "" if looser else refused(model)
    for model in required:
        if finishes[model.name]:
            raise ScheduleError(finishes[model.name])
    return dict(reversed(finishes.items()))


def _value(message: Task) -> str:
    """Return the name of a message, the same on both ranks."""
    send = message if message.kind[1] == "S" else other_end(message)
    return f"{send} of stage {send.stage}"


def _message(task: Task, schedule: ScheduleTable) -> Send | Receive:
    return (Send if task.kind[1] == "S" else Receive)(_value(task), schedule.rank_of[task.peer])


def _reductions(schedule: ScheduleTable, times: dict[Task, int]) -> None:
    """Check that the gradients of each stage are reduced once, after the last of them."""
    last: dict[int, int] = {}
    for task, time in times.items():
        if task.kind in ("BW", "WW"):
            last[task.stage] = max(time, last.get(task.stage, -1))
    reduced: dict[int, list[int]] = defaultdict(list)
    for time, rank, slot in placed(schedule.slots):
        for name, stage in slot.parameters:
            where = f"row {time}, rank {rank}: {name} of stage {stage}"
            if name not in ON_PARAMETERS or not 0 <= stage < schedule.stages or schedule.rank_of[stage] != rank:
                raise ScheduleError(f"{where} cannot be done there; there are {', '.join(ON_PARAMETERS)}")
            if name == REDUCE:
                reduced[stage].append(time)
                if time < last[stage]:
                    raise ScheduleError(f"{where} comes before its last gradient in row {last[stage]}: put it there")
    for stage, rank in enumerate(schedule.rank_of):
        if len(rows := reduced[stage]) != 1:
            how = (
                f"{len(rows)} times, in rows {' and '.join(map(str, rows))}"
                if rows
                else f"never, the last one is in row {last[stage]}"
            )
            raise ScheduleError(
                f"rank {rank}: the gradients of stage {stage} are reduced {how}: without {REDUCE} after the last one "
                f"they are not averaged; have it once"
            )


def _gathered(schedule: ScheduleTable) -> None:
    """Check that a stage with sharded parameters computes only while they are gathered.

    It must gather and free them in turn.
    """
    sharded = {stage for _, _, slot in placed(schedule.slots) for name, stage in slot.parameters if name != REDUCE}
    if not sharded:
        return
    last = {stage: (RESHARD, -1) for stage in sharded}  # the last action on its parameters, and its row
    for time, rank, slot in placed(schedule.slots):
        where = f"row {time}, rank {rank}"
        for task in slot.compute:
            name, before = last.get(task.stage, (UNSHARD, -1))
            if name == RESHARD:
                freed = f"{RESHARD} in row {before} has freed its parameters"
                since = freed if before >= 0 else "its parameters have not been gathered"
                raise ScheduleError(
                    f"{where}: {task.where}: {since}; put {UNSHARD} of stage {task.stage} into an earlier row"
                )
        for name, stage in slot.parameters:
            if name == REDUCE:
                continue
            other, before = last[stage]
            if name == other:
                nothing = "has nothing to free, the stage has not been gathered"
                why = f"comes after {other} in row {before}" if before >= 0 else nothing
                missing = RESHARD if name == UNSHARD else UNSHARD
                raise ScheduleError(f"{where}: {name} of stage {stage} {why}; leave it out, or put {missing} before it")
            last[stage] = name, time


def _releases(schedule: ScheduleTable, times: dict[Task, int]) -> None:
    """Check that slots release send buffers only where the rules of ``buffers`` allow it."""
    released = [(time, rank, send) for time, rank, slot in placed(schedule.slots) for send in slot.free]
    if not released:
        return
    first = release_rows(Flow(schedule))
    released_before: set[Task] = set()
    for time, rank, send in released:
        where = f"row {time}, rank {rank}: the buffer of {send.where} is released"
        if send not in times or send.kind[1] != "S" or schedule.rank_of[send.stage] != rank:
            raise ScheduleError(f"{where}, but that rank does not send it")
        if send in released_before:
            raise ScheduleError(f"{where} a second time; leave one out")
        released_before.add(send)
        for last in (send, *last_readers(send, schedule)):
            if times[last] >= time:
                event = "is sent" if last is send else f"is read by {last.where}, which runs its forward again,"
                raise ScheduleError(f"{where} before it {event} in row {times[last]}: release it later")
        if time < first[send]:
            later = "at the end of the step" if first[send] == NEVER else f"in row {first[send]}"
            raise ScheduleError(
                f"{where} before that rank can know that {other_end(send).where} has taken place: release it {later}"
            )
