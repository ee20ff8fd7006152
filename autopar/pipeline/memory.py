"""Count the memory of a schedule: what each slot allocates and frees, and the peak of each rank.

The peak depends only on the order and not on the times: each rank's slots follow one another, and slots allocate and
free buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, Literal, NamedTuple, get_args

from autopar.errors import ScheduleError, shown
from autopar.pipeline.buffers import releases
from autopar.pipeline.lowering import with_messages
from autopar.pipeline.per_stage import PAIRS, Sizes, per_stage
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
        sizes, held: the arguments of ``memory``.
    """

    peak: tuple[float, ...]
    at_peak: tuple[dict[str, float], ...]
    live: tuple[float, ...]
    schedule: Schedule = field(repr=False)
    sizes: Sizes
    held: frozenset[Held]

    @cached_property
    def changes(self) -> tuple[tuple[MemoryChange, ...], ...]:
        """The allocations and releases of each rank, in their order."""
        changes: list[list[MemoryChange]] = [[] for _ in range(self.schedule.ranks)]
        _walk(
            self.schedule,
            self.sizes,
            self.held,
            [lambda *change, of_rank=of_rank: of_rank.append(MemoryChange(*change)) for of_rank in changes],
        )
        return tuple(map(tuple, changes))


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
    fixed = per_stage(sizes.fixed, schedule.stages, "fixed")
    peaks = [_Peak(sum(fixed[stage] for stage in stages)) for stages in schedule.stages_of]
    held = frozenset(held)
    _walk(schedule, sizes, held, peaks)
    return Memory(
        tuple(peak.most for peak in peaks), tuple(peak.at for peak in peaks), _live(schedule), schedule, sizes, held
    )


class _Peak:
    """The peak of a rank so far; it is called with each change of the rank."""

    __slots__ = ("at", "most", "now", "total")

    def __init__(self, fixed: float) -> None:
        self.now = dict.fromkeys(KINDS, 0.0)
        self.total = self.most = fixed
        self.at = dict(self.now)

    def __call__(self, time: int, task: Task | None, after: bool, kind: str, bytes: float) -> None:
        self.now[kind] += bytes
        self.total += bytes
        if self.total > self.most:
            self.most, self.at = self.total, dict(self.now)


Take = Callable[[int, Task | None, bool, str, float], None]  # with the fields of a ``MemoryChange``


def _walk(schedule: ScheduleTable, sizes: Sizes, held: Collection[Held], takes: Sequence[Take]) -> None:
    """Go through the slots and call the ``take`` of each rank for every allocation and release."""
    stages, rank_of = schedule.stages, schedule.rank_of
    activation = per_stage(sizes.activation, stages, "activation")
    later = activation if sizes.for_weights is None else per_stage(sizes.for_weights, stages, "for_weights")
    boundary = per_stage(sizes.boundary, stages - 1, "boundary", PAIRS) if stages > 1 else []
    # bytes of a message between a stage and the next
    between = [b if rank_of[s] != rank_of[s + 1] else None for s, b in enumerate(boundary)]
    # the message size of each stage with the stage before it, and after it
    before, behind = ([None, *between], [*between, None])
    needs = {kind: per_stage(getattr(sizes, name), stages, name) for kind, name in RUNNING.items()}
    split = schedule.is_split
    last_of_forward, last_of_gradient = "BW" if schedule.recompute else "FW", "WW" if split else "BW"
    idle = [0.0] * schedule.ranks if sizes.pooled else []  # bytes of each rank's pool that no message uses
    free: Mapping[tuple[int, int], Sequence[Task]] = {
        (time, rank): slot.free for time, row in enumerate(schedule.slots) for rank, slot in enumerate(row) if slot.free
    } or (releases(schedule) if any(boundary) else {})

    for time, row in enumerate(schedule.slots):
        for rank, slot in enumerate(row):
            if not slot.tasks and not slot.free:
                continue
            take = takes[rank]
            for send in free.get((time, rank), ()):
                if send.kind[0] not in held:
                    take(time, None, False, "sends", -boundary[min(send.stage, send.peer)])
            for task in slot.tasks:
                if task.kind[1] == "R":
                    bytes = boundary[min(task.stage, task.peer)]
                    if idle:
                        used = min(bytes, idle[rank])
                        idle[rank] -= used
                        bytes -= used
                    take(time, None, False, "receives", bytes)
            for task in slot.tasks:
                kind, stage, _, _ = task
                if kind[1] != "W":
                    continue
                if kind == "FW":
                    take(time, task, False, "activations", activation[stage])
                    sent = behind[stage]
                else:
                    sent = before[stage] if kind == "BW" else None
                if sent is not None:
                    take(time, task, False, "sends", sent)
                if need := needs[kind][stage]:
                    take(time, task, False, "activations", need)
                    take(time, task, True, "activations", -need)
                if idle:
                    if kind == last_of_gradient:
                        idle[rank] += (before[stage] or 0.0) + (behind[stage] or 0.0)
                else:
                    if kind == last_of_forward and (read := before[stage]) is not None:
                        take(time, task, True, "receives", -read)
                    if kind == last_of_gradient and (read := behind[stage]) is not None:
                        take(time, task, True, "receives", -read)
                if kind == "BW":
                    take(time, task, True, "activations", (later[stage] if split else 0.0) - activation[stage])
                elif kind == "WW":
                    take(time, task, True, "activations", -later[stage])


def _live(schedule: ScheduleTable) -> tuple[float, ...]:
    now, most = [0] * schedule.ranks, [0] * schedule.ranks
    last = "WW" if schedule.is_split else "BW"
    for _, rank, task in schedule.tasks():
        if task.kind == "FW":
            now[rank] += 1
            most[rank] = max(most[rank], now[rank])
        elif task.kind == last:
            now[rank] -= 1
    return tuple(number / len(stages) for number, stages in zip(most, schedule.stages_of, strict=True))
