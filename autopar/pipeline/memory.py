"""Count the memory of a schedule: what each slot allocates and frees, and the peak of each rank.

The peak depends only on the order and not on the times: each rank's slots follow one another, and slots allocate and
free buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Generic, Literal, NamedTuple, get_args

from autopar.errors import ScheduleError, shown
from autopar.pipeline.buffers import releases, uses
from autopar.pipeline.lowering import with_messages
from autopar.pipeline.per_stage import Sizes, kept, per_pair, per_stage
from autopar.pipeline.schedule_table import Schedule, ScheduleTable
from autopar.pipeline.task import Task
from autopar.pipeline.verify import checked

Held = Literal["F", "B"]  # passes with send buffers
HELD: tuple[Held, ...] = get_args(Held)
KINDS = ("activations", "sends", "receives")
RUNNING = {"FW": "in_forward", "BW": "in_backward", "WW": "in_weight"}  # computation → what it needs while it runs


class MemoryChange(NamedTuple):
    """One allocation or release by a slot.

    Attributes:
        time: the row of the slot.
        task: the computation before or after which it happens; ``None`` if it happens when the slot begins.
        after: whether it happens after the computation.
        kind: one of ``KINDS``.
        bytes: positive for an allocation, negative for a release.
    """

    time: int
    task: Task | None
    after: bool
    kind: str
    bytes: float


@dataclass(frozen=True)
class Memory(Generic[Schedule]):
    """The peak memory, rank by rank.

    Attributes:
        peak: bytes, ``fixed`` included.
        at_peak: the bytes at the peak by kind: activations, sends, receives.
        live: the most micro-batches whose activations are kept at once: passes through a stage, over the stages of the
            rank.
        schedule: the schedule, with messages.
        changes: the allocations and releases of each rank, in their order.
        fixed: the bytes that each rank needs all the time.
    """

    peak: tuple[float, ...]
    at_peak: tuple[dict[str, float], ...]
    live: tuple[float, ...]
    schedule: Schedule = field(repr=False)
    changes: tuple[tuple[MemoryChange, ...], ...] = field(repr=False)
    fixed: tuple[float, ...]


def memory(schedule: Schedule, sizes: Sizes | None = None, *, held: Collection[Held] = ()) -> Memory[Schedule]:
    """Return the peak memory of a schedule on each rank.

    Args:
        sizes: default: an activation has size 1, and messages have size 0.
        held: passes (F, B) whose send buffers are kept to the end of the step, instead of being released by the rule of
            ``buffers``. It shows the cost of keeping them.

    Raises:
        TypeError: ``sizes`` is not a ``Sizes``.
        ScheduleError: the schedule is invalid, the number of sizes is not that of stages, or ``held`` has other passes
            than F and B.
    """
    sizes = Sizes() if sizes is None else sizes
    if not isinstance(sizes, Sizes):
        raise TypeError(f"sizes is a Sizes, not {shown(sizes)}")
    if unknown := set[str](held) - {*HELD}:
        raise ScheduleError(f"held is of the passes F and B, not {', '.join(map(repr, sorted(unknown)))}")
    schedule = with_messages(checked(schedule))
    of_stage = per_stage(sizes.fixed, schedule.stages, "fixed")
    fixed = tuple(sum(of_stage[stage] for stage in stages) for stages in schedule.stages_of)
    changes: list[list[MemoryChange]] = [[] for _ in range(schedule.ranks)]
    for rank, change in _changes(schedule, sizes, frozenset(held)):
        changes[rank].append(change)
    peak, at_peak = zip(*map(_peak, changes, fixed), strict=True)
    return Memory(peak, at_peak, _live(schedule), schedule, tuple(map(tuple, changes)), fixed)


def _peak(changes: Sequence[MemoryChange], fixed: float) -> tuple[float, dict[str, float]]:
    """Return the most bytes in use, and those by kind at that time."""
    now = dict.fromkeys(KINDS, 0.0)
    total, most, at = fixed, fixed, dict(now)
    for change in changes:
        now[change.kind] += change.bytes
        total += change.bytes
        if total > most:
            most, at = total, dict(now)
    return most, at


def _changes(schedule: ScheduleTable, sizes: Sizes, held: Collection[Held]) -> Iterator[tuple[int, MemoryChange]]:
    """Yield each allocation and release, with its rank."""
    stages, split = schedule.stages, schedule.is_split
    activation, later = kept(sizes, stages)
    boundary = per_pair(sizes.boundary, stages, "boundary")
    # what a computation keeps from its begin or its end on, less what was kept before it
    keeps = {
        ("FW", 1): activation,
        ("BW", -1): [(b if split else 0.0) - a for a, b in zip(activation, later, strict=True)],
        ("WW", -1): [-b for b in later],
    }
    needs = {kind: per_stage(getattr(sizes, name), stages, name) for kind, name in RUNNING.items()}
    idle = [0.0] * schedule.ranks  # bytes of each rank's pool that no message uses
    free = releases(schedule) if any(boundary) else {}
    for time, rank, task, what, change in uses(schedule, free, pooled=sizes.pooled):
        kind, stage, _, peer = what
        after = task is not None and change < 0
        if kind[1] == "W":
            own = keeps[kind, change][stage] if (kind, change) in keeps else 0.0
            changes = [own, change * needs[kind][stage]]
            yield from (
                (rank, MemoryChange(time, task, after, "activations", bytes)) for bytes in changes[::change] if bytes
            )
            continue
        bytes = boundary[min(stage, peer)]
        if kind[1] == "S":
            if change > 0 or kind[0] not in held:
                yield rank, MemoryChange(time, task, after, "sends", change * bytes)
        elif sizes.pooled and change < 0:
            idle[rank] += bytes
        else:
            used = min(bytes, idle[rank])
            idle[rank] -= used
            yield rank, MemoryChange(time, task, after, "receives", change * (bytes - used))


def _live(schedule: ScheduleTable) -> tuple[float, ...]:
    last = "WW" if schedule.is_split else "BW"
    changes: list[list[int]] = [[0] for _ in range(schedule.ranks)]
    for _, rank, task in schedule.tasks():
        if task.kind in ("FW", last):
            changes[rank].append(1 if task.kind == "FW" else -1)
    return tuple(max(accumulate(own)) / len(stages) for own, stages in zip(changes, schedule.stages_of, strict=True))
