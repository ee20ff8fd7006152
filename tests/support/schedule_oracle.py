"""What a pipeline schedule does, by brute force: all interleavings of its ranks, with values that say how they were
made.

Nothing here is shared with the verifier but the tasks. A message takes the *value* that is there when it is sent, and
what is received is the oldest on its way between the two ranks, whatever its name: a wrong order shows as a wrong
gradient.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

from autopar.pipeline.schedule import PipelineSchedule
from autopar.pipeline.task import Slot, Task

# pass, stage, micro-batch: in capitals what was computed, in small letters what was received
Key = tuple[str, int, int]
Store = frozenset[tuple[Key, Any, int]]  # what a rank has: key, value, and the row in which it was made
Step = tuple[str, Any, int]  # what a rank does next: its name, the task, the row


class Wrong(Exception):
    """A run that ends otherwise than it must."""


def is_right(schedule: PipelineSchedule) -> bool:
    """Whether all runs finish with the gradients that there must be, and no buffer is released while it may be read."""
    try:
        _stated(schedule)
        (_run_all if schedule.has_messages else _run_rows)(schedule)
        if any(slot.free for row in schedule.slots for slot in row):
            _released_in_order(schedule)
            _released_late(schedule)
    except Wrong:
        return False
    return True


def _stated(schedule: PipelineSchedule) -> None:
    """What values cannot show: each task once, messages between neighbours on two ranks, what is done to a stage on its
    rank."""
    counts = Counter(task[:3] for _, _, task in schedule.tasks())
    if any(count > 1 for count in counts.values()):
        raise Wrong("a task twice")
    for _, _, task in schedule.tasks():
        step = {"FS": 1, "FR": -1, "BS": -1, "BR": 1}.get(task.kind)
        if step and (
            task.peer != task.stage + step
            or not 0 <= task.peer < schedule.stages
            or schedule.rank_of[task.peer] == schedule.rank_of[task.stage]
        ):
            raise Wrong("a message for nobody")
    for row in schedule.slots:
        for rank, slot in enumerate(row):
            if any(schedule.rank_of[stage] != rank for _, stage in slot.parameters):
                raise Wrong("another rank's parameters")


# -- values ------------------------------------------------------------------------------------------------------------


def _run_rows(schedule: PipelineSchedule) -> None:
    """Without messages: row by row, and what another rank made in an earlier row is there."""
    split = any(task.kind == "WW" for _, _, task in schedule.tasks())
    stores: tuple[Store, ...] = (frozenset(),) * schedule.ranks
    for time, rank, task in schedule.tasks():
        made = stores[rank]
        for key, value in _computed(task, made, stores, schedule, split, time):
            made = _with(made, key, value, time)
        stores = (*stores[:rank], made, *stores[rank + 1 :])
    _ended_right(schedule, stores, reduced=False)


def _run_all(schedule: PipelineSchedule) -> None:
    """Every order in which the ranks can take their steps; all end alike. Receives are waited for where they stand."""
    split = any(task.kind == "WW" for _, _, task in schedule.tasks())
    steps: list[list[Step]] = [[] for _ in range(schedule.ranks)]
    for time, row in enumerate(schedule.slots):
        for rank, slot in enumerate(row):
            steps[rank] += _steps(slot, time)
    start = (0,) * schedule.ranks, (frozenset(),) * schedule.ranks, frozenset()
    seen, todo, ends = {start}, [start], set()
    while todo:
        at, stores, queues = state = todo.pop()
        following = []
        for rank, own in enumerate(steps):
            if at[rank] == len(own):
                continue
            name, task, row = own[at[rank]]
            store, on_way = stores[rank], dict(queues)
            if name == "send":
                pair = rank, schedule.rank_of[task.peer]
                value = _read(store, (task.kind[0], task.stage, task.batch), row)
                on_way[pair] = (*on_way.get(pair, ()), (value, row))
            elif name == "receive":
                pair = schedule.rank_of[task.peer], rank
                if pair not in on_way:
                    continue
                (value, sent), *rest = on_way.pop(pair)
                if rest:
                    on_way[pair] = tuple(rest)
                store = _with(store, (task.kind[0].lower(), task.stage, task.batch), value, max(row, sent))
            elif name == "reduce":
                if {key for key, _, _ in store if key[:2] == ("W", task)} != {
                    ("W", task, batch) for batch in range(schedule.batches)
                }:
                    raise Wrong("reduced before all gradients are there")
                store = _with(store, ("reduced", task, -1), None, row)
            else:
                for key, value in _computed(task, store, None, schedule, split, row):
                    store = _with(store, key, value, row)
            following.append(
                (
                    (*at[:rank], at[rank] + 1, *at[rank + 1 :]),
                    (*stores[:rank], store, *stores[rank + 1 :]),
                    frozenset(on_way.items()),
                )
            )
        if not following:
            ends.add(state)
        todo += (new for new in following if new not in seen)
        seen.update(following)
    assert len(ends) == 1, "one run decides for all"
    ((at, stores, queues),) = ends
    if any(done < len(own) for done, own in zip(at, steps, strict=True)) or queues:
        raise Wrong("ranks wait forever, or messages are left")
    _ended_right(schedule, stores, reduced=True)


def _steps(slot: Slot, row: int) -> Iterator[Step]:
    yield from (("send", task, row) for task in slot.tasks if task.kind[1] == "S")
    yield from (("receive", task, row) for task in slot.tasks if task.kind[1] == "R")
    yield from (("compute", task, row) for task in slot.tasks if task.kind[1] == "W")
    yield from (("reduce", stage, row) for name, stage in slot.parameters if name == "REDUCE_GRAD")


def _computed(task: Task, store: Store, others: tuple[Store, ...] | None, schedule: PipelineSchedule, split: bool,
              row: int) -> Iterator[tuple[Key, Any]]:  # fmt: skip
    kind, stage, batch, _ = task

    def brought(of: str, peer: int) -> Any:
        """What a neighbour made: here, in a message, or without messages over there."""
        if schedule.rank_of[peer] == schedule.rank_of[stage]:
            return _read(store, (of, peer, batch), row + 1)
        if others is not None:
            return _read(others[schedule.rank_of[peer]], (of, peer, batch), row)
        return _read(store, (of.lower(), stage, batch), row)

    if kind == "FW":
        yield ("F", stage, batch), ("F", stage, brought("F", stage - 1) if stage else batch)
    elif kind == "BW":
        forward = _read(store, ("F", stage, batch), row + 1)
        gradient = ("B", stage, forward, brought("B", stage + 1) if stage + 1 < schedule.stages else "loss")
        yield ("B", stage, batch), gradient
        if not split:
            yield ("W", stage, batch), gradient
    else:
        yield ("W", stage, batch), _read(store, ("B", stage, batch), row + 1)


def _read(store: Store, key: Key, before: int) -> Any:
    for there, value, row in store:
        if there == key and row < before:
            return value
    raise Wrong(f"{key} is not there yet")


def _with(store: Store, key: Key, value: Any, row: int) -> Store:
    if any(there == key for there, _, _ in store):
        raise Wrong(f"{key} twice")
    return store | {(key, value, row)}


def _ended_right(schedule: PipelineSchedule, stores: tuple[Store, ...], *, reduced: bool) -> None:
    @cache
    def forward(stage: int, batch: int) -> Any:
        return ("F", stage, forward(stage - 1, batch) if stage else batch)

    @cache
    def backward(stage: int, batch: int) -> Any:
        return (
            "B",
            stage,
            forward(stage, batch),
            backward(stage + 1, batch) if stage + 1 < schedule.stages else "loss",
        )

    found = {key: value for store in stores for key, value, _ in store}
    for stage, rank in enumerate(schedule.rank_of):
        for batch in range(schedule.batches):
            if found.get(("W", stage, batch)) != backward(stage, batch):
                raise Wrong("a wrong gradient, or none")
        if reduced and ("reduced", stage, -1) not in {key for key, _, _ in stores[rank]}:
            raise Wrong("gradients that are not reduced")


# -- buffers: receives complete as late as they can, when they are read ------------------------------------------------


def _released_in_order(schedule: PipelineSchedule) -> None:
    """On its rank a buffer is released once, after it was sent and, where forwards are run again, after the
    backward."""
    for rank in range(schedule.ranks):
        sent: set[Task] = set()
        released: set[Task] = set()
        again: set[Task] = set()
        for row in schedule.slots:
            for send in row[rank].free:
                reread = schedule.recompute and send.kind == "FS" and Task("BW", send.stage, send.batch) not in again
                if send not in sent or send in released or reread:
                    raise Wrong("released too early, twice, or never sent")
                released.add(send)
            sent |= set(row[rank].send)
            again |= set(row[rank].compute)


def _released_late(schedule: PipelineSchedule) -> None:
    """No run reaches a release while the other rank has not begun what reads the message."""
    steps: list[list[tuple[tuple[Task, ...], Task | None, tuple[Task, ...]]]] = []  # released, computed, then launched
    sent: dict[tuple[int, int], list[Task]] = defaultdict(list)
    place: dict[Task, tuple[int, int]] = {}
    message: dict[Task, tuple[tuple[int, int], int]] = {}  # reader → ranks, and which of their messages it reads
    numbers: Counter[tuple[int, int]] = Counter()
    for rank in range(schedule.ranks):
        steps.append([])
        for row in schedule.slots:
            slot = row[rank]
            for task in slot.receive:
                pair = schedule.rank_of[task.peer], rank
                message[Task(task.kind[0] + "W", task.stage, task.batch)] = pair, numbers[pair]
                numbers[pair] += 1
            steps[rank].append(((), None, slot.send))
            computed = slot.compute or (None,)
            for i, task in enumerate(computed):
                if task is not None:
                    place[task] = rank, len(steps[rank])
                steps[rank].append((slot.free if i == 0 else (), task, ()))
            for task in slot.send:
                sent[rank, schedule.rank_of[task.peer]].append(task)
    launched = {
        task: next(i for i, step in enumerate(steps[schedule.rank_of[task.stage]]) if task in step[2])
        for own in sent.values()
        for task in own
    }
    start = (0,) * schedule.ranks
    seen, todo = {start}, [start]
    while todo:
        at = todo.pop()
        for rank, own in enumerate(steps):
            if at[rank] == len(own):
                continue
            free, task, _ = own[at[rank]]
            if task in message:
                pair, number = message[task]
                if at[pair[0]] <= launched[sent[pair][number]]:
                    continue
            for send in free:
                other, step = place[Task(send.kind[0] + "W", send.peer, send.batch)]
                if at[other] <= step:
                    raise Wrong("released before it was received")
            new = (*at[:rank], at[rank] + 1, *at[rank + 1 :])
            if new not in seen:
                seen.add(new)
                todo.append(new)
