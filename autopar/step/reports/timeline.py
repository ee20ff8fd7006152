"""Show a simulated step beside a recorded one, as a table and a trace with the times of each op and message."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from autopar.notebook import InNotebook
from autopar.runtime.recording import RecordedLine, RecordedRun
from autopar.scheduling.op import COMPUTE
from autopar.scheduling.programs.communication import Communication
from autopar.scheduling.trace import simulated_track
from autopar.traces import Arrow, Slice, Track, save_trace, trace


@dataclass(frozen=True)
class StepTimeline(InNotebook):
    """One step, simulated and recorded.

    Times are in seconds. A recorded step runs line by line, which takes some microseconds more for each line. The end
    of a recorded message is not known; it is not after its wait.

    Attributes:
        communication: the simulated step.
        runs: for each rank, the runs of its functions, with times since all ranks were ready.
    """

    communication: Communication
    runs: tuple[Sequence[RecordedRun], ...]

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """For each rank, the seconds to the end of its last line."""
        return tuple(max((line.end for line in _lines(runs)), default=0.0) for runs in self.runs)

    @cached_property
    def exposed(self) -> tuple[float, ...]:
        """For each rank, the seconds in waits."""
        return tuple(sum(line.end - line.begin for line in _lines(runs) if line.kind == "wait") for runs in self.runs)

    def trace(self) -> dict[str, Any]:
        """Return the trace in Chrome's format, which Perfetto shows: the simulation, and each rank."""
        return trace(self._tracks(), self._about)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON; open it at ui.perfetto.dev."""
        save_trace(self._tracks(), path, self._about)

    def __str__(self) -> str:
        table = Table("", *(Column(name, justify="right") for name in ("ms", "exposed ms", "lines", "messages")))
        made = self.communication
        lines = [line for _, schedule in made.in_turn() for line in schedule.lines]
        starts = sum(line.kind == "start" for line in lines)
        table.add_row("simulated", *_row(made.makespan, made.exposed, len(lines), starts))
        for rank, runs in enumerate(self.runs):
            count = sum(len(run.messages) for run in runs)
            table.add_row(f"rank {rank}", *_row(self.seconds[rank], self.exposed[rank], len(_lines(runs)), count))
        out = io.StringIO()
        Console(file=out, width=120).print(table)
        return out.getvalue()

    @property
    def recorded(self) -> list[Track]:
        """What each rank ran, a track for each, as ``page(timeline=…)`` draws it."""
        return [recorded_track(f"rank {rank}", runs) for rank, runs in enumerate(self.runs)]

    def _tracks(self) -> list[Track]:
        return [simulated_track("simulated", self.communication.in_turn()), *self.recorded]

    @property
    def _about(self) -> dict[str, object]:
        made = self.communication
        return {"makespan": made.makespan, "bound": made.bound, "exposed": made.exposed, "source": made.source}


def _row(seconds: float, exposed: float, lines: int, messages: int) -> tuple[str, ...]:
    return f"{seconds * 1e3:,.3f}", f"{exposed * 1e3:,.3f}", f"{lines}", f"{messages}"


def _lines(runs: Sequence[RecordedRun]) -> list[RecordedLine]:
    return [line for run in runs for line in run.lines]


def recorded_track(name: str, runs: Sequence[RecordedRun], meetings: Meetings | None = None) -> Track:
    """Return the track of a rank. A message is under way from its start to the end of its wait.

    Args:
        meetings: receives the slices of collectives.
    """
    track = Track(name)
    starts: dict[tuple[str, str], Slice] = {}
    for run in runs:
        for line in run.lines:
            about = {"function": run.name, "module": "/".join(line.path[1:]), "line": line.text}
            if line.kind == "compute":
                track.slices.append(Slice(line.name, COMPUTE, line.begin, line.end, "compute", about))
            elif line.kind == "start":
                start = Slice(f"start {line.name}", COMPUTE, line.begin, line.end, "start", about)
                starts.setdefault((line.name, line.stream), start)
                track.slices.append(start)
            else:
                wait = Slice(f"wait {line.name}", COMPUTE, line.begin, line.end, "exposed", about)
                track.slices.append(wait)
                if (started := starts.pop((line.name, line.stream), None)) is not None:  # else the step before did
                    track.slices.append(Slice(line.name, line.stream, started.begin, line.end, "under way", about))
                    track.arrows.append(Arrow(started, wait))
                    if meetings is not None:
                        meetings.add(name, line, started, wait)
    return track


@dataclass
class Meetings:
    """The slices of collectives on all ranks: the start and the wait of each member."""

    _members: dict[tuple[Any, ...], dict[str, list[tuple[Slice, Slice]]]] = field(default_factory=dict)

    def add(self, track: str, line: RecordedLine, start: Slice, wait: Slice) -> None:
        """Add the start and the wait of one member. ``line``: its wait."""
        key = line.ranks, line.name, line.stream
        self._members.setdefault(key, {}).setdefault(track, []).append((start, wait))

    def arrows(self) -> Iterator[tuple[str, Arrow]]:
        """Yield an arrow from the start of the last member to the waits of the others, with the track of that start."""
        for members in self._members.values():
            for together in zip(*members.values(), strict=True):  # the first of all, the second of all, …
                starts = {track: start for track, (start, _) in zip(members, together, strict=True)}
                last = max(starts, key=lambda track: starts[track].begin)
                for track, (_, wait) in zip(members, together, strict=True):
                    if track != last:
                        yield last, Arrow(starts[last], wait, track, "collective")
