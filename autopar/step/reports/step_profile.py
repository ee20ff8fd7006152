"""Show recorded steps beside the computed one, by module and phase, as a table and a trace for Perfetto.

The trace has a track for what was computed, and one for each rank:

    rank 0
      compute   │ forward                                 │ backward …
                │ layers.0         │ layers.1              │
                │ t  addmm  start… │ wait…  addmm  relu    │
      tp            ╰──── mm_1_tp ──╯
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Column, Table

from autopar.capture.blocks import ancestors, blocks
from autopar.ir.nodes import record_of
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.recording import RecordedRun, RecordedSlot
from autopar.runtime.spans import Path, module_parts, shared
from autopar.scheduling.op import COMPUTE
from autopar.scheduling.programs.communication import Communication
from autopar.scheduling.trace import simulated_track
from autopar.step.pipelined.reports.timeline import Mail
from autopar.step.pipelined.reports.timeline import recorded_track as track_of_slots
from autopar.step.reports.timeline import Meetings
from autopar.step.reports.timeline import recorded_track as track_of_lines
from autopar.traces import Slice, Track, save_trace, trace

OTHER_STAGES, AGREEMENT = "(other stages)", "(agreement of the ranks)"
NOT_REAL = "simulated ranks have no times of their own: no step ran; start real ones with torchrun"

Key = tuple[str, str]  # module, phase
Places = Mapping[str, Mapping[str, tuple[str, str]]]
"""Part of the step → value → its phase and the path of its module."""


class RankRecord(NamedTuple):
    """What was recorded on one rank, for each step. ``words``: the name of its track."""

    words: str
    runs: tuple[tuple[RecordedRun, ...], ...]
    slots: tuple[tuple[RecordedSlot, ...], ...]

    @staticmethod
    def of(steps: Sequence[tuple[float, Sequence[RecordedRun], Sequence[RecordedSlot]]], words: str) -> RankRecord:
        """Make it of steps: the seconds that are added to the times of each, and what was recorded."""
        return RankRecord(
            words,
            tuple(
                tuple(run._replace(lines=[_later(line, at) for line in run.lines]) for run in runs)
                for at, runs, _ in steps
            ),
            tuple(tuple(_later(slot, at) for slot in slots) for at, _, slots in steps),
        )


class Computed(NamedTuple):
    """The computed step.

    Attributes:
        tracks: what the trace shows of it.
        makespan: its seconds.
        exposed: the seconds of exposed communication.
        between: those of them in which a rank waits for other stages; ``None`` without stages.
    """

    tracks: Sequence[Track]
    makespan: float
    exposed: float
    between: float | None = None


@dataclass(frozen=True)
class StepProfile:
    """Recorded steps, beside the computed one. Prints as a table. Times are in seconds.

    A recorded step runs line by line, which takes some microseconds more for each line.

    Attributes:
        communication: the computed functions.
        places: where each value is computed.
        computed: the computed step.
        ranks: what was recorded on each rank; empty if the ranks are simulated.
        steps: how many steps ran.
        path: the file that has the trace.
    """

    communication: Communication
    places: Places
    computed: Computed
    ranks: tuple[RankRecord, ...]
    steps: int
    path: str

    @cached_property
    def real(self) -> dict[Key, tuple[float, float]]:
        """(module, phase) → seconds of computing and of exposed communication in a step.

        They are those of the median step, and of the rank that takes longest.
        """
        most: dict[Key, tuple[float, float]] = {}
        for rank in self.ranks:
            each = [self._of_step(runs, slots) for runs, slots in zip(rank.runs, rank.slots, strict=True)]
            for key in dict.fromkeys(key for step in each for key in step):
                cell = [median(column) for column in zip(*(step.get(key, (0.0, 0.0)) for step in each), strict=True)]
                before = most.get(key, (0.0, 0.0))
                most[key] = (max(before[0], cell[0]), max(before[1], cell[1]))
        return most

    @cached_property
    def planned(self) -> dict[Key, tuple[float, float]]:
        """(module, phase) → the computed seconds, as of ``real``."""
        cells: dict[Key, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for slice in simulated_track("computed", self.communication.in_turn()).slices:
            if slice.thread == COMPUTE:
                phase, module = place_of(slice, self.places)
                cells[self._row(module), phase][slice.shows == "exposed"] += slice.end - slice.begin
        if self.computed.between is not None:
            cells[OTHER_STAGES, ""][1] = self.computed.between
        return {key: (computing, exposed) for key, (computing, exposed) in cells.items()}

    def trace(self) -> dict[str, Any]:
        """Return the trace in Chrome's format, which Perfetto shows: the computed step, and each rank."""
        return trace(self._tracks(), self._about)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON; open it at ui.perfetto.dev."""
        save_trace(self._tracks(), path, self._about)

    def __str__(self) -> str:
        names = ("real ms", "computed ms", "real exposed ms", "computed exposed ms")
        table = Table("module", "phase", *(Column(name, justify="right") for name in names))
        rows = list(dict.fromkeys((*self.planned, *self.real)))
        for module, phase in rows:
            real, planned = self.real.get((module, phase)), self.planned.get((module, phase))
            pairs = [(real and real[k], planned and planned[k]) for k in (0, 1)]
            table.add_row(module or "(the model)", phase, *(_ms(value) for pair in pairs for value in pair))
        table.add_section()
        total = max(map(_length_of_step, self.ranks), default=None)
        exposed = max((sum(self._exposed(rank)) / self.steps for rank in self.ranks), default=None)
        table.add_row("step", "", *map(_ms, (total, self.computed.makespan, exposed, self.computed.exposed)))
        out = io.StringIO()
        Console(file=out, width=120).print(table)
        ran = f"{self.steps} steps on {len(self.ranks)} rank{'s' * (len(self.ranks) > 1)}" if self.ranks else NOT_REAL
        notes = "".join(f"{note}\n" for note in self.communication.notes)
        return f"{out.getvalue()}{ran}; {self.path} is for ui.perfetto.dev\n{notes}"

    @cached_property
    def _blocks(self) -> frozenset[str]:
        modules = {module for values in self.places.values() for _, module in values.values()}
        return blocks({outer for module in modules for outer in ancestors(module)})

    def _row(self, module: str) -> str:
        """Return the row of a module: its block, or itself if it is in none."""
        return next((outer for outer in ancestors(module) if outer in self._blocks), module)

    def _of_step(self, runs: Iterable[RecordedRun], slots: Iterable[RecordedSlot]) -> dict[Key, tuple[float, float]]:
        cells: dict[Key, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for run in runs:
            for line in run.lines:
                phase, *parts = line.path or ("",)
                row = self._row(".".join(parts)) if line.path else AGREEMENT
                cells[row, phase][line.kind == "wait"] += line.end - line.begin
        for slot in slots:
            if slot.kind == "wait":
                cells[OTHER_STAGES, ""][1] += slot.end - slot.begin
        return {key: (computing, exposed) for key, (computing, exposed) in cells.items()}

    @staticmethod
    def _exposed(rank: RankRecord) -> list[float]:
        lines = [line for runs in rank.runs for run in runs for line in run.lines if line.kind == "wait"]
        slots = [slot for step in rank.slots for slot in step if slot.kind == "wait"]
        return [*(line.end - line.begin for line in lines), *(slot.end - slot.begin for slot in slots)]

    def _tracks(self) -> list[Track]:
        meetings = Meetings()
        mail = Mail({rank.words: k for k, rank in enumerate(self.ranks)})
        tracks = {rank.words: recorded_track(rank, meetings, mail) for rank in self.ranks}
        for of, arrow in (*meetings.arrows(), *mail.arrows()):
            tracks[of].arrows.append(arrow)
        return [*self.computed.tracks, *tracks.values()]

    @property
    def _about(self) -> dict[str, object]:
        made = self.computed
        about = {"makespan": made.makespan, "exposed": made.exposed, "source": self.communication.source}
        return {**about, "steps": self.steps} if self.ranks else {**about, "recorded": NOT_REAL}


def places_of(local: LocalPrograms) -> dict[str, tuple[str, str]]:
    """Return where each value of a program is computed: its phase, and the path of its module."""
    found: dict[str, tuple[str, str]] = {}
    for program in local.every_class:
        for node in program.nodes:
            if node.op == "call_function":
                phase, module = record_of(node).phase, record_of(node).module
                found.setdefault(node.name, (phase, "" if phase == "update" else module))
    return found


def place_of(slice: Slice, places: Places) -> tuple[str, str]:
    """Return the phase and the module of a computed slice."""
    own = places.get(str(slice.about["function"]).partition(": ")[0], {})
    value = slice.name.removeprefix("wait ").removeprefix("start ").partition(" ")[0]
    return own.get(value, ("", ""))


def computed_track(name: str, made: Communication, places: Places) -> Track:
    """Return the track of the computed step, with its modules."""
    track = simulated_track(name, made.in_turn())
    inner = []
    for slice in track.slices:
        if slice.thread == COMPUTE:
            phase, module = place_of(slice, places)
            inner.append(((phase, *module_parts(module)), slice.begin, slice.end, slice.shows != "compute"))
    _put_around(track, inner)
    return track


def recorded_track(rank: RankRecord, meetings: Meetings, mail: Mail) -> Track:
    """Return the track of a rank: steps, slots, modules and lines, which lie in each other; and its messages."""
    track = track_of_slots(rank.words, [slot for step in rank.slots for slot in step], mail)
    lines = track_of_lines(rank.words, [run for runs in rank.runs for run in runs], meetings)
    track.slices += lines.slices
    track.arrows += lines.arrows
    inner = [
        ((f"step {k}", *line.path), line.begin, line.end, line.kind != "compute")
        for k, runs in enumerate(rank.runs, 1)
        for run in runs
        for line in run.lines
    ]
    # a slot lies in its step, and modules lie in the slot
    around = [(((f"step {k}",)), slot.begin, slot.end, False) for k, step in enumerate(rank.slots, 1) for slot in step]
    if around:
        inner = [(path[1:], begin, end, exchanges) for path, begin, end, exchanges in inner]
        _put_around(track, sorted(around, key=lambda row: row[1]))
    _put_around(track, inner, [(slot.begin, slot.end) for step in rank.slots for slot in step])
    return track


def _put_around(
    track: Track, inner: Sequence[tuple[Path, float, float, bool]], apart: Sequence[tuple[float, float]] = ()
) -> None:
    """Add slices of the modules around others.

    Args:
        inner: in their order, the path of each slice, when it begins and ends, and whether it exchanges data: then it
            lies in the module that is computed around it.
        apart: spans of time in which slices belong together; those of different spans do not share a module's slice.
    """
    opened: list[tuple[str, float]] = []
    at: Path = ()
    before, spans, current = 0.0, iter(sorted(apart)), (0.0, 0.0)

    def close(depth: int) -> None:
        while len(opened) > depth:
            name, begin = opened.pop()
            track.slices.append(Slice(name, COMPUTE, begin, before, "module"))

    for path, begin, end, exchanges in inner:
        new = False
        while apart and begin >= current[1] and (following := next(spans, None)) is not None:
            current, new = following, True
        if exchanges and not new and at[:1] == path[:1]:
            path = at
        same = 0 if new else shared(at, path)
        close(same)
        opened += [(name, begin) for name in path[same:]]
        at, before = path, end
    close(0)
    track.slices.sort(key=lambda slice: (slice.begin, -slice.end, slice.shows != "module"))


def _later(record: Any, seconds: float) -> Any:
    return record._replace(begin=record.begin + seconds, end=record.end + seconds)


def _length_of_step(rank: RankRecord) -> float:
    """Return the seconds of the median step, from the begin of its first line or slot to the end of its last."""
    each = []
    for runs, slots in zip(rank.runs, rank.slots, strict=True):
        begun = [*(line.begin for run in runs for line in run.lines), *(slot.begin for slot in slots)]
        ended = [*(line.end for run in runs for line in run.lines), *(slot.end for slot in slots)]
        each.append(max(ended) - min(begun) if ended else 0.0)
    return median(each)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.3f}"
