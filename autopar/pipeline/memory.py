"""The memory that a schedule uses: what each slot takes and gives back, and the most that is in use at once.

That is a property of the order alone and not of the times: each rank's slots follow one another, and buffers are taken and
given back by slots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.errors import ScheduleError
from autopar.pipeline.buffers import with_frees
from autopar.pipeline.dataflow import target
from autopar.pipeline.schedule import PipelineSchedule
from autopar.pipeline.task import Task

PerStage = float | Iterable[float]
KINDS = ("activations", "sends", "receives")


@dataclass(frozen=True)
class Sizes:
    """What a micro-batch keeps, in bytes or any other unit; one number, or one for each stage.

    Attributes:
        activation: from the begin of its forward to the end of its backward.
        for_weights: what of that is kept for the weight gradient, where it is computed separately; ``None``: all of it.
        boundary: a tensor between two stages, and its gradient; one number, or one for each two neighbours.
        fixed: what is there all the time: parameters, gradients, optimizer state.
    """

    activation: PerStage = 1.0
    for_weights: PerStage | None = None
    boundary: PerStage = 0.0
    fixed: PerStage = 0.0


class Change(NamedTuple):
    """What a slot takes or gives back.

    Attributes:
        time: the row of the slot.
        task: the computation before or after which it happens; ``None``: when the slot begins.
        after: after the computation.
        kind: one of ``KINDS``.
        bytes: more, or less where negative.
    """

    time: int
    task: Task | None
    after: bool
    kind: str
    bytes: float


@dataclass(frozen=True)
class Memory:
    """The most that is in use, rank by rank.

    Attributes:
        peak: bytes, ``fixed`` included.
        at_peak: the same by kind: activations, sends, receives.
        live: micro-batches whose activations are kept: passes through a stage, over the stages of the rank.
        changes: what each rank takes and gives back, in its order.
    """

    peak: tuple[float, ...]
    at_peak: tuple[dict[str, float], ...]
    live: tuple[float, ...]
    changes: tuple[tuple[Change, ...], ...]


def memory(schedule: PipelineSchedule, sizes: Sizes | None = None, *, held: Collection[str] = ()) -> Memory:
    """The memory that a schedule uses.

    Args:
        sizes: default: an activation is one, and messages are nothing.
        held: passes (F, B) whose send buffers are kept to the end of the step instead of being released by the rule of
            ``buffers``: what that would cost.
    """
    sizes = sizes or Sizes()
    schedule = schedule.checked()
    if not any(slot.free for row in schedule.slots for slot in row):
        schedule = with_frees(schedule)
    stages = schedule.stages
    changes: list[list[Change]] = [[] for _ in range(schedule.ranks)]
    split = {(task.stage, task.batch) for _, _, task in schedule.tasks() if task.kind == "WW"}
    activation = per_stage(sizes.activation, stages, "activation")
    later = activation if sizes.for_weights is None else per_stage(sizes.for_weights, stages, "for_weights")
    boundary = per_stage(sizes.boundary, stages - 1, "boundary") if stages > 1 else []
    for time, row in enumerate(schedule.slots):
        for rank, slot in enumerate(row):
            own = changes[rank]
            for send in slot.free:
                if send.kind[0] not in held:
                    own.append(Change(time, None, False, "sends", -boundary[min(send.stage, send.peer)]))
            for task in slot.tasks:
                if task.kind[1] == "R":
                    own.append(Change(time, None, False, "receives", boundary[min(task.stage, task.peer)]))
            for task in slot.tasks:
                if task.kind[1] == "W":
                    own += _computation(task, time, schedule, split, activation[task.stage], later[task.stage], boundary)
    fixed = per_stage(sizes.fixed, stages, "fixed")
    peaks = [_peak(own, sum(fixed[stage] for stage in schedule.stages_of[rank])) for rank, own in enumerate(changes)]
    live = [_live(own, len(schedule.stages_of[rank])) for rank, own in enumerate(_orders(schedule))]
    return Memory(tuple(p for p, _ in peaks), tuple(k for _, k in peaks), tuple(live), tuple(map(tuple, changes)))


def _computation(task: Task, time: int, schedule: PipelineSchedule, split: set[tuple[int, int]], activation: float, later: float,
                 boundary: Sequence[float]) -> Iterator[Change]:  # fmt: skip
    rank_of, key = schedule.rank_of, (task.stage, task.batch)
    send = target(task, rank_of)
    if task.kind == "FW":
        yield Change(time, task, False, "activations", activation)
    if send is not None:
        yield Change(time, task, False, "sends", boundary[min(send.stage, send.peer)])
    if task.kind == "BW":
        yield Change(time, task, True, "activations", later - activation if key in split else -activation)
    elif task.kind == "WW":
        yield Change(time, task, True, "activations", -later)
    for peer, last in ((task.stage - 1, "BW" if schedule.recompute else "FW"), (task.stage + 1, "WW" if key in split else "BW")):
        if task.kind == last and 0 <= peer < len(rank_of) and rank_of[peer] != rank_of[task.stage]:
            yield Change(time, task, True, "receives", -boundary[min(task.stage, peer)])


def _peak(changes: Sequence[Change], fixed: float) -> tuple[float, dict[str, float]]:
    now = dict.fromkeys(KINDS, 0.0)
    total = most = fixed
    at = dict(now)
    for change in changes:
        now[change.kind] += change.bytes
        total += change.bytes
        if total > most:
            most, at = total, dict(now)
    return most, at


def _orders(schedule: PipelineSchedule) -> list[list[Task]]:
    orders: list[list[Task]] = [[] for _ in range(schedule.ranks)]
    for _, rank, task in schedule.tasks():
        if task.kind[1] == "W":
            orders[rank].append(task)
    return orders


def _live(order: Sequence[Task], chunks: int) -> float:
    last = {(task.stage, task.batch): task for task in order if task.kind != "FW"}
    now = most = 0
    for task in order:
        if task.kind == "FW":
            now += 1
            most = max(most, now)
        elif last[task.stage, task.batch] is task:
            now -= 1
    return most / chunks


def per_stage(value: PerStage, stages: int, what: str) -> list[float]:
    """One number for each stage."""
    numbers = list(value) if isinstance(value, Iterable) else [value] * stages
    if len(numbers) != stages:
        raise ScheduleError(f"{what} has {len(numbers)} numbers, and there are {stages}")
    for number in numbers:
        if isinstance(number, (str, bool)) or not 0 <= number < float("inf"):
            raise ScheduleError(f"{what} is {number!r}: a finite number from 0")
    return [float(number) for number in numbers]
