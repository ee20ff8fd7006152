"""Store the table of a schedule, and answer questions that the table alone decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from autopar.errors import ScheduleError, shown
from autopar.pipeline.events import with_events
from autopar.pipeline.shape import placement, stages_of, table, whole
from autopar.pipeline.task import Slot, Table, Task, placed


@dataclass(frozen=True)
class ScheduleTable:
    """The fields of a ``PipelineSchedule``, and its queries.

    The verifier, the lowering, the simulator and the formats use them. These take a schedule of any subclass, and
    return schedules of the same class.

    Attributes:
        slots: a row for each time, with a slot for each rank; computations alone, or with their messages.
        batches: the number of micro-batches.
        rank_of: the rank of each stage.
        name: the name of the policy that made the schedule.
        recompute: whether a backward runs its forward again, which reads the tensors that the forward received and
            sent.
    """

    slots: Table = field(repr=False)
    batches: int
    rank_of: tuple[int, ...]
    name: str = ""
    recompute: bool = False

    def __post_init__(self) -> None:
        for name, value in (("batches", whole(self.batches, "batches")), ("rank_of", placement(self.rank_of))):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "slots", table(self.slots, self.batches, self.rank_of))
        if not isinstance(self.recompute, bool):
            raise TypeError(f"recompute is True or False, not {shown(self.recompute)}")
        if not isinstance(self.name, str) or not self.name.isprintable():
            raise ScheduleError(f"the name of a schedule must be printable, {shown(self.name)} is not")

    @property
    def title(self) -> str:
        """``1f1b on 4 ranks, 8 micro-batches``"""
        stages = f", {self.stages} stages" if self.stages > self.ranks else ""
        return (
            f"{self.name or 'a schedule'} on {self.ranks} rank{'s' * (self.ranks > 1)}{stages}, {self.batches} "
            f"micro-batch{'es' * (self.batches > 1)}"
        )

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @cached_property
    def ranks(self) -> int:
        return max(self.rank_of) + 1

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in increasing order: its chunks."""
        return stages_of(self.rank_of)

    @property
    def chunks(self) -> int:
        """The largest number of stages on one rank."""
        return max(map(len, self.stages_of))

    def chunk_of(self, stage: int) -> int:
        """Return the position of a stage among the stages of its rank."""
        return self.stages_of[self.rank_of[stage]].index(stage)

    @cached_property
    def has_messages(self) -> bool:
        """Whether the slots contain sends, receives and reductions, and not only computations."""
        return any(slot.parameters or slot.messages for _, _, slot in placed(self.slots))

    @cached_property
    def is_split(self) -> bool:
        """Whether weight gradients are computed apart from input gradients: each backward has a ``WW``."""
        return any(task.kind == "WW" for _, _, task in self.tasks())

    def tasks(self) -> Iterator[tuple[int, int, Task]]:
        """Yield all tasks, row by row: time, rank, task."""
        for time, rank, slot in placed(self.slots):
            for task in slot.tasks:
                yield time, rank, task

    def slot(self, time: int, stage: int) -> Slot:
        """Return the part of a slot that belongs to one stage.

        Raises:
            ScheduleError: the schedule has no such row, or no such stage.
        """
        time, stage = whole(time, "slot: time"), whole(stage, "slot: stage")
        if not 0 <= time < len(self.slots):
            rows = f"only 0 to {len(self.slots) - 1}" if self.slots else "since the schedule is empty"
            raise ScheduleError(f"there is no row {time}, {rows}; len(schedule.slots) is the number of rows")
        if not 0 <= stage < self.stages:
            raise ScheduleError(f"there is no stage {stage}, only 0 to {self.stages - 1}")
        slot = self.slots[time][self.rank_of[stage]]
        return replace(slot, tasks=tuple(t for t in slot.tasks if t.stage == stage),
                       free=tuple(t for t in slot.free if t.stage == stage),
                       parameters=tuple(p for p in slot.parameters if p[1] == stage))  # fmt: skip

    @cached_property
    def compute_table(self) -> Table:
        """The rows that compute, without messages. Each slot waits for two events and records two."""
        rows = [[Slot(slot.compute) for slot in row] for row in self.slots]
        return with_events([row for row in rows if any(slot.tasks for slot in row)], each=2)

    def without_messages(self: Schedule) -> Schedule:
        """Return the schedule with its computations alone."""
        rows = tuple(tuple(Slot(slot.compute) for slot in row) for row in self.compute_table)
        return replace(self, slots=rows)

    @property
    def is_known_right(self) -> bool:
        """Whether the schedule has been verified, or was made by a policy."""
        return "_right" in self.__dict__

    def known_right(self: Schedule) -> Schedule:
        """Mark the schedule as valid, so that it is not verified again, and return it.

        Copies with other slots lose the mark.
        """
        self.__dict__["_right"] = True
        return self


Schedule = TypeVar("Schedule", bound=ScheduleTable)
