"""Offer a pipeline schedule as one class: the table, and methods that verify, simulate, print, save and load it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from autopar.errors import ScheduleError
from autopar.notebook import InNotebook
from autopar.pipeline.events import Events, Index, events_of, index, with_events
from autopar.pipeline.formats import from_csv, from_json, table, to_csv, to_json
from autopar.pipeline.lowering import with_messages
from autopar.pipeline.per_stage import Sizes, Times
from autopar.pipeline.schedule_table import ScheduleTable
from autopar.pipeline.shape import whole
from autopar.pipeline.simulate import Simulation, simulate
from autopar.pipeline.task import Pass, Table
from autopar.pipeline.verify import Verification, verify


@dataclass(frozen=True)
class PipelineSchedule(InNotebook, ScheduleTable):
    """A table of slots, ``[time][rank]``. Where each rank has one stage, the stage has the number of its rank.

    Times are an order and not a duration: a rank goes through its slots one after the other, and a slot that reads the
    result of another rank is in a later row. Both ends of a message may be in one row.

    Attributes:
        slots: a row for each time, with a slot for each rank; computations alone, or with their messages.
        batches: the number of micro-batches.
        rank_of: the rank of each stage.
        name: the name of the policy that made the schedule.
        recompute: a backward runs its forward again, for which it reads the tensors that the forward received and sent.
    """

    def with_messages(self, *, latest: bool = False) -> PipelineSchedule:
        """Return the schedule with a send and a receive for each result that another rank reads.

        It is the same object if it has messages already.
        """
        return with_messages(self, latest=latest)

    # -- events ------------------------------------------------------------------------------------------------------

    @cached_property
    def compute_comm_table(self) -> Table:
        """The rows with messages. Each slot waits for one event and records one."""
        return with_events(self.with_messages().slots, each=1)

    def events(self, batch: int, stage: int, of: Pass) -> Events:
        """Return the events of a micro-batch's forward (F) or backward (B) on a stage, in both tables; -1 for none.

        Raises:
            ScheduleError: the schedule has no such pass.
        """
        return events_of(whole(batch, "batch"), whole(stage, "stage"), of, *self.checked()._indices)

    @cached_property
    def _indices(self) -> tuple[Index, Index]:
        return index(self.compute_table), index(self.compute_comm_table)

    # -- text and files ----------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return f"{self.title}\n{self.table(messages=self.has_messages)}"

    def table(self, *, messages: bool = True, events: bool = False, down: bool = False) -> str:
        """Return the schedule as a text table of fixed width, without a final line end.

        See ``autopar.pipeline.formats.table``.

        Args:
            messages: print ``compute_comm_table``, else ``compute_table``.
            events: print after the tasks of a slot the events that it waits for and those that it records, ``-1>0``.
            down: print time downwards, with a column for each rank and numbered rows.
        """
        return table(self, self.compute_comm_table if messages else self.compute_table, events=events, down=down)

    def to_json(self) -> str:
        """Return the schedule as JSON, without loss; see ``autopar.pipeline.formats.document``."""
        return to_json(self)

    @staticmethod
    def from_json(text: str) -> PipelineSchedule:
        """Read a schedule from JSON; see ``autopar.pipeline.formats.document``."""
        return from_json(text, PipelineSchedule)

    def to_csv(self, *, messages: bool = False) -> str:
        """Return the schedule as actions of torch.distributed.pipelining; see ``autopar.pipeline.formats.actions``."""
        return to_csv(self, messages=messages)

    @staticmethod
    def from_csv(text: str, **options: Any) -> PipelineSchedule:
        """Read a schedule from actions of torch.distributed.pipelining; see ``autopar.pipeline.formats.actions``."""
        return from_csv(text, PipelineSchedule, **options)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Verify the schedule and write it to a file: ``.json``, or ``.csv`` for torch.

        It is written with messages if it has them. A CSV has neither the name, nor ``recompute``, nor the rows in which
        buffers are released.
        """
        form = suffix(path)
        right = self.checked()
        text = right.to_json() if form == ".json" else right.to_csv(messages=self.has_messages)
        Path(path).write_text(text, encoding="utf-8", newline="")

    @staticmethod
    def load(path: str | os.PathLike[str], **options: Any) -> PipelineSchedule:
        """Read a file that ``save`` or torch has written, and verify the schedule.

        Args:
            options: those of ``from_csv``.

        Raises:
            ScheduleError: the file is malformed (with line and column), or the schedule is invalid.
        """
        form = suffix(path)
        if options and form == ".json":
            raise TypeError(f"{path}: JSON contains {', '.join(options)} itself; these are options of CSV")
        try:
            with open(path, encoding="utf-8", newline="") as file:
                text = file.read()
            return (
                PipelineSchedule.from_json(text) if form == ".json" else PipelineSchedule.from_csv(text, **options)
            ).checked()
        except UnicodeDecodeError:
            raise ScheduleError(
                f"{path}: the file is not text in UTF-8; a schedule is stored as .json or .csv"
            ) from None
        except ScheduleError as error:
            raise ScheduleError(f"{path}: {error}") from None

    # -- verification and simulation ---------------------------------------------------------------------------------

    def checked(self) -> PipelineSchedule:
        """Verify the schedule at the first call, and return it. Schedules of policies are known to be valid."""
        if not self.is_known_right:
            self.verify()
        return self.known_right()

    def verify(self, **options: Any) -> Verification[PipelineSchedule]:
        """Check all rules that a schedule must keep; see ``autopar.pipeline.verify``."""
        return verify(self, **options)

    def simulate(
        self, times: Times | None = None, sizes: Sizes | None = None, **options: Any
    ) -> Simulation[PipelineSchedule]:
        """Compute when each task begins and ends, and the memory; see ``autopar.pipeline.simulate``."""
        return simulate(self, times, sizes, **options)


def suffix(path: str | os.PathLike[str]) -> str:
    """Return the format of a file, ``.json`` or ``.csv``, by its name."""
    form = Path(path).suffix.lower()
    if form not in (".json", ".csv"):
        raise ValueError(f"{path}: a schedule is stored as .json, or as .csv for torch")
    return form
