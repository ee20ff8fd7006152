"""Show a recorded step beside the simulated one, as a table and a trace with the times of each op, message and slot."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from rich.table import Table

from autopar.notebook import InNotebook, printed, right
from autopar.pipeline import PipelineSchedule, Task
from autopar.pipeline.simulate import Simulation
from autopar.pipeline.timeline import Span
from autopar.runtime.recording import RecordedRun, RecordedSlot
from autopar.scheduling.programs.communication import Communication
from autopar.scheduling.trace import simulated_track
from autopar.step.reports.rank_record import RankRecord
from autopar.step.reports.tracks import Meetings, recorded_track, simulated_tracks
from autopar.traces import Event, Track, save_trace, trace

PASSES = {"FW": "forward ms", "BW": "backward ms", "WW": "weights ms"}


@dataclass(frozen=True)
class RecordedStep(InNotebook):
    """Recorded steps, beside the computed one. Prints as a table. Times are in seconds.

    A recorded step runs line by line, or slot by slot, which takes some microseconds more for each. The end of a
    recorded message is not known; it is not after its wait.

    Attributes:
        communication: the computed functions.
        simulation: the simulated slots, where the step has stages: no copies before them, and no update behind them.
        ranks: what was recorded on each rank; empty if the ranks are simulated.
    """

    communication: Communication
    simulation: Simulation[PipelineSchedule] | None
    ranks: tuple[RankRecord, ...]

    @property
    def computed(self) -> Communication | Simulation[PipelineSchedule]:
        """What has the computed time of a step."""
        return self.communication if self.simulation is None else self.simulation

    def trace(self) -> Event:
        """Return the trace in Chrome's format, which Perfetto shows: the computed step, and each rank."""
        return trace(self._tracks(), self._about)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON; open it at ui.perfetto.dev."""
        save_trace(self._tracks(), path, self._about)

    def _tracks(self) -> list[Track]:
        raise NotImplementedError

    @property
    def _about(self) -> Mapping[str, object]:
        """Facts about the whole trace."""
        raise NotImplementedError


class StepTimeline(RecordedStep):
    """One step, simulated and recorded. Prints as a table.

    The attributes are those of ``RecordedStep``.
    """

    @property
    def runs(self) -> tuple[tuple[RecordedRun, ...], ...]:
        """For each rank, the runs of its functions; without lines where the step has stages."""
        return tuple(rank.runs[0] for rank in self.ranks)

    @property
    def slots(self) -> tuple[tuple[RecordedSlot, ...], ...]:
        """For each rank, its slots, where the step has stages."""
        return tuple(rank.slots[0] for rank in self.ranks)

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """For each rank, the seconds to the end of the step."""
        return tuple(max((span.end for step in rank.steps for span in step), default=0.0) for rank in self.ranks)

    @cached_property
    def exposed(self) -> tuple[float, ...]:
        """For each rank, the seconds in waits."""
        return tuple(rank.exposed for rank in self.ranks)

    def executed(self, rank: int) -> list[Task]:
        """Return the passes and messages of a rank in the order in which they were computed and started.

        It is that of the slots of the schedule, and of its ``events``.
        """
        return [task for slot in self.slots[rank] if slot.kind != "wait" for task in slot.tasks]

    def __str__(self) -> str:
        return printed(self._by_line() if self.simulation is None else self._by_slot(self.simulation))

    def _by_line(self) -> Table:
        table = Table("", *map(right, ("ms", "exposed ms", "lines", "messages")))
        made = self.communication
        lines = [line for _, schedule in made.in_turn() for line in schedule.lines]
        starts = sum(line.kind == "start" for line in lines)
        table.add_row("simulated", *_ms((made.makespan, made.exposed)), f"{len(lines)}", f"{starts}")
        for rank, runs in enumerate(self.runs):
            counts = (sum(len(run.lines) for run in runs), sum(len(run.messages) for run in runs))
            table.add_row(f"rank {rank}", *_ms((self.seconds[rank], self.exposed[rank])), *map(str, counts))
        return table

    def _by_slot(self, made: Simulation[PipelineSchedule]) -> Table:
        names = ("ms", "slots ms", *PASSES.values(), "waits ms", "messages")
        table = Table("", "stages", *map(right, names))
        for position, spans in enumerate(made.computed):
            span = spans[-1].end - spans[0].start
            passes = [sum(_length(s) for s in spans if s.op.kind == kind) for kind in PASSES]
            messages = sum(len(row[position].messages) for row in made.schedule.slots)
            row = _ms((span, *passes, span - made.work[position]))
            table.add_row("simulated", _numbers(made.schedule.stages_of[position]), "", *row, f"{messages}")
        for rank, slots in enumerate(self.slots):
            own = [slot for slot in slots if slot.tasks]
            computed = {slot.tasks[0]: slot for slot in own if slot.kind == "compute"}
            begin, end = min(slot.begin for slot in own), max(slot.end for slot in computed.values())
            passes = [sum(_length(s) for task, s in computed.items() if task.kind == kind) for kind in PASSES]
            waits = sum(_length(slot) for slot in own if slot.kind == "wait" and slot.end <= end)
            messages = sum(len(slot.tasks) for slot in own if slot.kind == "start")
            row = _ms((self.seconds[rank], end - begin, *passes, waits))
            table.add_row(f"rank {rank}", _numbers(self.ranks[rank].stages), *row, f"{messages}")
        return table

    @property
    def recorded(self) -> list[Track]:
        """What each rank ran, a track for each, as ``page(timeline=…)`` draws it."""
        return [recorded_track(rank, Meetings()) for rank in self.ranks]

    def _tracks(self) -> list[Track]:
        if self.simulation is None:
            return [simulated_track("simulated", self.communication.in_turn()), *self.recorded]
        return [*simulated_tracks(self.simulation), *self.recorded]

    @property
    def _about(self) -> Mapping[str, object]:
        if self.simulation is None:
            made = self.communication
            return {"makespan": made.makespan, "bound": made.bound, "exposed": made.exposed, "source": made.source}
        slots = self.simulation
        return {"schedule": slots.schedule.title, "makespan": slots.makespan, "exposed": list(slots.exposed)}


def _length(span: Span | RecordedSlot) -> float:
    return span.end - (span.begin if isinstance(span, RecordedSlot) else span.start)


def _ms(seconds: Iterable[float]) -> list[str]:
    return [f"{each * 1e3:,.3f}" for each in seconds]


def _numbers(stages: Iterable[int]) -> str:
    return " ".join(map(str, stages))
