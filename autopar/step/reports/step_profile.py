"""Show recorded steps beside the computed one, by module and phase, as a table and a trace for Perfetto."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from rich.table import Table

from autopar.capture.blocks import ancestors, blocks
from autopar.ir.nodes import record_of
from autopar.notebook import printed, right
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.recording import RecordedRun, RecordedSlot
from autopar.scheduling.op import COMPUTE
from autopar.scheduling.trace import simulated_track
from autopar.step.reports.rank_record import RankRecord
from autopar.step.reports.timeline import RecordedStep
from autopar.step.reports.tracks import Meetings, Places, computed_track, place_of, simulated_tracks, track_with_modules
from autopar.traces import Track

OTHER_STAGES, AGREEMENT = "(other stages)", "(agreement of the ranks)"
NOT_REAL = "simulated ranks have no times of their own: no step ran; start real ones with torchrun"

Key = tuple[str, str]  # module, phase


@dataclass(frozen=True)
class StepProfile(RecordedStep):
    """Recorded steps, beside the computed one. Prints as a table of modules and phases.

    Attributes:
        places: where each value is computed.
        steps: how many steps ran.
        path: the file that has the trace.
    """

    places: Places
    steps: int
    path: str

    @property
    def between(self) -> float | None:
        """The computed seconds in which a rank waits for other stages; ``None`` without stages."""
        return None if self.simulation is None else max(self.simulation.exposed, default=0.0)

    @property
    def exposed(self) -> float:
        """The computed seconds of exposed communication, between stages too."""
        return self.communication.exposed + (self.between or 0.0)

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
        if self.between is not None:
            cells[OTHER_STAGES, ""][1] = self.between
        return {key: (computing, exposed) for key, (computing, exposed) in cells.items()}

    def __str__(self) -> str:
        names = ("real ms", "computed ms", "real exposed ms", "computed exposed ms")
        table = Table("module", "phase", *map(right, names))
        rows = list(dict.fromkeys((*self.planned, *self.real)))
        for module, phase in rows:
            real, planned = self.real.get((module, phase)), self.planned.get((module, phase))
            pairs = [(real and real[k], planned and planned[k]) for k in (0, 1)]
            table.add_row(module or "(the model)", phase, *(_ms(value) for pair in pairs for value in pair))
        table.add_section()
        total = max(map(_length_of_step, self.ranks), default=None)
        exposed = max((rank.exposed / self.steps for rank in self.ranks), default=None)
        table.add_row("step", "", *map(_ms, (total, self.computed.makespan, exposed, self.exposed)))
        ran = f"{self.steps} steps on {len(self.ranks)} rank{'s' * (len(self.ranks) > 1)}" if self.ranks else NOT_REAL
        notes = "".join(f"{note}\n" for note in self.communication.notes)
        return f"{printed(table)}{ran}; {self.path} is for ui.perfetto.dev\n{notes}"

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

    def _tracks(self) -> list[Track]:
        meetings = Meetings()
        tracks = {rank.words: track_with_modules(rank, meetings) for rank in self.ranks}
        for of, arrow in meetings.arrows():
            tracks[of].arrows.append(arrow)
        if self.simulation is None:
            return [computed_track("computed", self.communication, self.places), *tracks.values()]
        return [*simulated_tracks(self.simulation), *tracks.values()]

    @property
    def _about(self) -> Mapping[str, object]:
        about = {"makespan": self.computed.makespan, "exposed": self.exposed, "source": self.communication.source}
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


def _length_of_step(rank: RankRecord) -> float:
    """Return the seconds of the median step, from the begin of its first line or slot to the end of its last."""
    steps = [step for step in rank.steps if step]
    lengths = [max(span.end for span in step) - min(span.begin for span in step) for step in steps]
    return median(lengths + [0.0] * (len(rank.steps) - len(steps)))


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.3f}"
