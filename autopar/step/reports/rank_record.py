"""Hold what ranks have recorded of steps, on one clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from autopar.runtime.recording import RecordedLine, RecordedRun, RecordedSlot, clock_offsets

S = TypeVar("S", RecordedLine, RecordedSlot)


class Recording(NamedTuple):
    """What one rank has recorded of one step.

    Attributes:
        machine: the host of the rank.
        begun: when the recorder was made, by the clock of the host; other times are seconds since then.
        runs: the lines of each function that ran.
        slots: where the step has stages, the slots.
    """

    machine: str
    begun: float
    runs: Sequence[RecordedRun]
    slots: Sequence[RecordedSlot]


class RankRecord(NamedTuple):
    """What was recorded on one rank, for each step. Times are in seconds, on one clock for all ranks of a machine.

    Attributes:
        rank: the rank.
        stages: its stages; none without a pipeline.
        runs: the lines of each function that ran.
        slots: where the step has stages, what the rank has computed, started and waited for, in the order in which that
            has ended.
    """

    rank: int
    stages: tuple[int, ...]
    runs: tuple[tuple[RecordedRun, ...], ...]
    slots: tuple[tuple[RecordedSlot, ...], ...]

    @property
    def words(self) -> str:
        """The name of its track: ``rank 0, stage 1``."""
        return f"rank {self.rank}" + (f", {stages_text(self.stages)}" if self.stages else "")

    @property
    def steps(self) -> list[list[RecordedLine | RecordedSlot]]:
        """The lines and slots of each step."""
        return [
            [*(line for run in runs for line in run.lines), *slots]
            for runs, slots in zip(self.runs, self.slots, strict=True)
        ]

    @property
    def exposed(self) -> float:
        """The seconds in waits, of all steps."""
        return sum(span.end - span.begin for step in self.steps for span in step if span.kind == "wait")


def on_one_clock(
    recordings: Mapping[int, Sequence[Recording]], stages: Mapping[int, tuple[int, ...]]
) -> tuple[RankRecord, ...]:
    """Return what ranks have recorded, with seconds since the first rank was ready for the first step.

    Args:
        recordings: rank → its recording of each step.
        stages: rank → its stages.
    """
    firsts = [steps[0] for steps in recordings.values()]
    offsets = clock_offsets([(first.machine, first.begun) for first in firsts])
    found = []
    for (rank, steps), first, offset in zip(recordings.items(), firsts, offsets, strict=True):
        since = [made.begun - first.begun + offset for made in steps]
        runs = tuple(
            tuple(run._replace(lines=[_later(line, at) for line in run.lines]) for run in made.runs)
            for made, at in zip(steps, since, strict=True)
        )
        slots = tuple(tuple(_later(slot, at) for slot in made.slots) for made, at in zip(steps, since, strict=True))
        found.append(RankRecord(rank, stages[rank], runs, slots))
    return tuple(found)


def _later(record: S, seconds: float) -> S:
    return record._replace(begin=record.begin + seconds, end=record.end + seconds)


def stages_text(stages: Sequence[int]) -> str:
    """Return ``stage 0``, or ``stages 0 2``."""
    return f"stage{'s' * (len(stages) > 1)} {' '.join(map(str, stages))}"
