"""A pipeline schedule: which rank does what, in which order, and the events that keep it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import ScheduleError, shown
from autopar.pipeline.events import Events, Index, events_of, index, with_events
from autopar.pipeline.shape import placement, table, whole
from autopar.pipeline.task import Pass, Slot, Table, Task

if TYPE_CHECKING:
    from autopar.pipeline.per_stage import Sizes, Times
    from autopar.pipeline.simulate import Simulation
    from autopar.pipeline.verify import Verification


@dataclass(frozen=True)
class PipelineSchedule:
    """A table of slots, ``[time][rank]``. With one stage a rank, a rank is its stage.

    Times order what happens, they measure nothing: a rank goes through its slots one after the other, and what comes from
    another rank was done there in an earlier row. Both ends of a message may be in one row.

    Attributes:
        slots: computations alone, or with their messages.
        batches: the number of micro-batches.
        rank_of: the rank of each stage.
        name: of the policy that made it.
        recompute: a backward runs its forward again, for which it reads the tensors received and sent by that.
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
            raise ScheduleError(f"the name of a schedule can be printed, {shown(self.name)} cannot")

    @property
    def title(self) -> str:
        """``1f1b on 4 ranks, 8 micro-batches``"""
        stages = f", {self.stages} stages" if self.stages > self.ranks else ""
        return f"{self.name or 'a schedule'} on {self.ranks} rank{'s' * (self.ranks > 1)}{stages}, {self.batches} micro-batch{'es' * (self.batches > 1)}"

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @cached_property
    def ranks(self) -> int:
        return max(self.rank_of) + 1

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in their order: its chunks."""
        own: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, rank in enumerate(self.rank_of):
            own[rank].append(stage)
        return tuple(map(tuple, own))

    @property
    def chunks(self) -> int:
        """Stages of the rank that has most."""
        return max(map(len, self.stages_of))

    def chunk_of(self, stage: int) -> int:
        """Which of its rank's stages a stage is."""
        return self.stages_of[self.rank_of[stage]].index(stage)

    @cached_property
    def has_messages(self) -> bool:
        """Whether the slots say what is sent, received and reduced, and not only what is computed."""
        return any(slot.parameters or any(task.kind[1] != "W" for task in slot.tasks) for row in self.slots for slot in row)

    @cached_property
    def is_split(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs: then each backward has a ``WW``."""
        return any(task.kind == "WW" for _, _, task in self.tasks())

    def tasks(self) -> Iterator[tuple[int, int, Task]]:
        """All tasks, row by row: time, rank, task."""
        for time, row in enumerate(self.slots):
            for rank, slot in enumerate(row):
                for task in slot.tasks:
                    yield time, rank, task

    def slot(self, time: int, stage: int) -> Slot:
        """What of a slot belongs to a stage.

        Raises:
            ScheduleError: the schedule has no such row, or no such stage.
        """
        time, stage = whole(time, "slot: time"), whole(stage, "slot: stage")
        if not 0 <= time < len(self.slots):
            rows = f"only 0 to {len(self.slots) - 1}" if self.slots else "since the schedule is empty"
            raise ScheduleError(f"there is no row {time}, {rows}; len(schedule.slots) is the number of rows")
        if not 0 <= stage < self.stages:
            raise ScheduleError(f"there is no stage {stage}, only 0 to {self.stages - 1}")
        own = self.slots[time][self.rank_of[stage]]
        return replace(own, tasks=tuple(t for t in own.tasks if t.stage == stage), free=tuple(t for t in own.free if t.stage == stage),
                       parameters=tuple(p for p in own.parameters if p[1] == stage))  # fmt: skip

    # -- tables and events -------------------------------------------------------------------------------------------

    @cached_property
    def compute_table(self) -> Table:
        """The rows that compute, without messages; each slot with two events that it waits for, and two it records."""
        rows = [[Slot(slot.compute) for slot in row] for row in self.slots]
        return with_events([row for row in rows if any(slot.tasks for slot in row)], each=2)

    @cached_property
    def compute_comm_table(self) -> Table:
        """The rows with messages; each slot with the event that it waits for, and the one it records."""
        return with_events(self.with_messages().slots, each=1)

    def events(self, batch: int, stage: int, of: Pass) -> Events:
        """The events of a micro-batch's forward (F) or backward (B) on a stage, of both tables; -1 where there is none.

        Raises:
            ScheduleError: there is no such pass in the schedule.
        """
        return events_of(whole(batch, "batch"), whole(stage, "stage"), of, *self.checked()._indices)

    @cached_property
    def _indices(self) -> tuple[Index, Index]:
        return index(self.compute_table), index(self.compute_comm_table)

    def with_messages(self, *, latest: bool = False) -> PipelineSchedule:
        """The same schedule, with a send and a receive for each result that another rank reads; itself if it has them."""
        from autopar.pipeline.lowering import lower

        return self if self.has_messages else lower(self.checked(), latest=latest).known_right()

    def without_messages(self) -> PipelineSchedule:
        """The computations alone."""
        rows = tuple(tuple(Slot(slot.compute) for slot in row) for row in self.compute_table)
        return replace(self, slots=rows)

    def checked(self) -> PipelineSchedule:
        """Itself, verified at the first call; what a policy made is right."""
        if "_right" not in self.__dict__:
            self.verify()
        return self.known_right()

    def known_right(self) -> PipelineSchedule:
        """Itself, which need not be verified. Copies with other slots are."""
        self.__dict__["_right"] = True
        return self

    # -- as text -----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return f"{self.title}\n{self.table(messages=self.has_messages)}"

    def table(self, *, messages: bool = True, events: bool = False, down: bool = False) -> str:
        """The table of fixed width; see ``autopar.pipeline.formats.table``."""
        from autopar.pipeline.formats import table

        return table(self, messages=messages, events=events, down=down)

    def to_json(self) -> str:
        """The canonical form; see ``autopar.pipeline.formats.document``."""
        from autopar.pipeline.formats import to_json

        return to_json(self)

    @staticmethod
    def from_json(text: str) -> PipelineSchedule:
        from autopar.pipeline.formats import from_json

        return from_json(text)

    def to_csv(self, *, messages: bool = False) -> str:
        """The actions of torch.distributed.pipelining; see ``autopar.pipeline.formats.actions``."""
        from autopar.pipeline.formats import to_csv

        return to_csv(self, messages=messages)

    @staticmethod
    def from_csv(text: str, **options: Any) -> PipelineSchedule:
        from autopar.pipeline.formats import from_csv

        return from_csv(text, **options)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, verified: ``.json``, or ``.csv`` for torch, with messages where it has them.

        A CSV has no place for the name, for ``recompute``, and for when buffers are released.
        """
        form = suffix(path)
        right = self.checked()
        text = right.to_json() if form == ".json" else right.to_csv(messages=self.has_messages)
        Path(path).write_text(text, encoding="utf-8", newline="")

    @staticmethod
    def load(path: str | os.PathLike[str], **options: Any) -> PipelineSchedule:
        """Read what ``save`` or torch has written, and verify it.

        Args:
            options: of ``from_csv``.

        Raises:
            ScheduleError: the file is malformed, with line and column; or the schedule is wrong.
        """
        form = suffix(path)
        if options and form == ".json":
            raise TypeError(f"{path}: JSON says {', '.join(options)} itself; these are options of CSV")
        try:
            with open(path, encoding="utf-8", newline="") as file:
                text = file.read()
            return (PipelineSchedule.from_json(text) if form == ".json" else PipelineSchedule.from_csv(text, **options)).checked()
        except UnicodeDecodeError:
            raise ScheduleError(f"{path}: this is no text in UTF-8; a schedule is kept as .json or .csv") from None
        except ScheduleError as error:
            raise ScheduleError(f"{path}: {error}") from None

    # -- what it is asked for ----------------------------------------------------------------------------------------

    def verify(self, **options: Any) -> Verification:
        """Check everything that must hold of it; see ``autopar.pipeline.verify``."""
        from autopar.pipeline.verify import verify

        return verify(self, **options)

    def simulate(self, times: Times | None = None, sizes: Sizes | None = None, **options: Any) -> Simulation:
        """Run it on paper; see ``autopar.pipeline.simulate``."""
        from autopar.pipeline.simulate import simulate

        return simulate(self, times, sizes, **options)


def suffix(path: str | os.PathLike[str]) -> str:
    """Which form a file has, by its name."""
    found = Path(path).suffix.lower()
    if found not in (".json", ".csv"):
        raise ValueError(f"{path}: a schedule is kept as .json, or as .csv for torch")
    return found
