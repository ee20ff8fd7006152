"""Show a recorded step on stages beside the simulated one, as a table and a trace with the times of each slot."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from autopar.notebook import InNotebook
from autopar.pipeline import PipelineSchedule, Task
from autopar.pipeline.simulate import Simulation
from autopar.runtime.recording import RecordedSlot, clock_offsets
from autopar.scheduling.op import COMPUTE
from autopar.traces import Arrow, Slice, Track, save_trace, trace

PASSES = {"FW": "forward ms", "BW": "backward ms", "WW": "weights ms"}


@dataclass(frozen=True)
class PipelinedTimeline(InNotebook):
    """One step on the stages of a pipeline, simulated and recorded. Prints as a table.

    Times are in seconds, on one clock for all ranks of a machine; the clocks of several machines begin when all ranks
    are ready. A recorded slot takes some microseconds more than another. The end of a recorded message is not known; it
    is not after its wait. The simulation has the slots alone: no copies before them, and no update behind them.

    Attributes:
        simulation: the simulated slots, for each position along the pipeline.
        slots: for each rank what it has computed, started and waited for, in the order in which that has ended.
        positions: the position of each rank along the pipeline.
    """

    simulation: Simulation[PipelineSchedule]
    slots: tuple[tuple[RecordedSlot, ...], ...]
    positions: tuple[int, ...]

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """For each rank, the seconds to the end of the step."""
        return tuple(max((slot.end for slot in slots), default=0.0) for slots in self.slots)

    @cached_property
    def exposed(self) -> tuple[float, ...]:
        """For each rank, the seconds in which it waits for other stages."""
        return tuple(_length(slot for slot in slots if slot.kind == "wait") for slots in self.slots)

    def executed(self, rank: int) -> list[Task]:
        """Return the passes and messages of a rank in the order in which they were computed and started.

        It is that of the slots of the schedule, and of its ``events``.
        """
        return [task for slot in self.slots[rank] if slot.kind != "wait" for task in slot.tasks]

    def trace(self) -> dict[str, Any]:
        """Return the trace in Chrome's format, which Perfetto shows: the simulation, and each rank."""
        return trace(self._tracks(), self._about)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON; open it at ui.perfetto.dev."""
        save_trace(self._tracks(), path, self._about)

    def __str__(self) -> str:
        names = ("ms", "slots ms", *PASSES.values(), "waits ms", "messages")
        table = Table("", "stages", *(Column(name, justify="right") for name in names))
        made = self.simulation
        stages = [" ".join(map(str, own)) for own in made.schedule.stages_of]
        for position, spans in enumerate(made.computed):
            span = spans[-1].end - spans[0].start
            passes = {kind: _length(s for s in spans if s.op.kind == kind) for kind in PASSES}
            messages = sum(len(row[position].messages) for row in made.schedule.slots)
            idle = span - made.work[position]
            table.add_row("simulated", stages[position], "", *_row((span, *passes.values(), idle)), f"{messages}")
        for rank, position in enumerate(self.positions):
            own = [slot for slot in self.slots[rank] if slot.tasks]
            computed = {slot.tasks[0]: slot for slot in own if slot.kind == "compute"}
            begin, end = min(slot.begin for slot in own), max(slot.end for slot in computed.values())
            passes = {kind: _length(s for task, s in computed.items() if task.kind == kind) for kind in PASSES}
            waits = _length(slot for slot in own if slot.kind == "wait" and slot.end <= end)
            messages = sum(len(slot.tasks) for slot in own if slot.kind == "start")
            row = _row((self.seconds[rank], end - begin, *passes.values(), waits))
            table.add_row(f"rank {rank}", stages[position], *row, f"{messages}")
        out = io.StringIO()
        Console(file=out, width=120).print(table)
        return out.getvalue()

    @property
    def recorded(self) -> list[Track]:
        """What each rank ran, a track for each, as ``page(timeline=…)`` draws it."""
        ranks = enumerate(zip(self.slots, self.positions, strict=True))
        stages = [stages_text(own) for own in self.simulation.schedule.stages_of]
        return [recorded_track(f"rank {rank}, {stages[at]}", slots) for rank, (slots, at) in ranks]

    def _tracks(self) -> list[Track]:
        return [*simulated_tracks(self.simulation), *self.recorded]

    @property
    def _about(self) -> dict[str, object]:
        made = self.simulation
        return {"schedule": made.schedule.title, "makespan": made.makespan, "exposed": list(made.exposed)}


def on_one_clock(begun: Sequence[tuple[str, float]], slots: Sequence[Sequence[RecordedSlot]]
                 ) -> tuple[tuple[RecordedSlot, ...], ...]:  # fmt: skip
    """Return the slots of all ranks with seconds since the ranks of a machine were ready.

    Args:
        begun: for each rank its machine, and when it was ready by the clock of that machine.
        slots: for each rank its slots, with seconds since then.
    """
    return tuple(
        tuple(slot._replace(begin=slot.begin + offset, end=slot.end + offset) for slot in own)
        for offset, own in zip(clock_offsets(begun), slots, strict=True)
    )


def _length(spans: Iterable[Any]) -> float:
    return sum(span.end - (span.begin if isinstance(span, RecordedSlot) else span.start) for span in spans)


def _row(seconds: Iterable[float]) -> list[str]:
    return [f"{each * 1e3:,.3f}" for each in seconds]


def simulated_tracks(simulation: Simulation[PipelineSchedule]) -> list[Track]:
    """Return a track for each position: its passes, and the messages that it sends."""
    tracks = []
    for position, spans in enumerate(simulation.computed):
        track = Track(f"simulated {stages_text(simulation.schedule.stages_of[position])}")
        track.slices += [Slice(str(s.op), COMPUTE, s.start, s.end, "compute", _about(s.op)) for s in spans]
        sent = [span for span in simulation.sent if span.link[0] == position]
        track.slices += [Slice(str(s.op), _stream(s.op), s.start, s.end, "message", _about(s.op)) for s in sent]
        tracks.append(track)
    return tracks


def recorded_track(name: str, slots: Sequence[RecordedSlot], mail: Mail | None = None) -> Track:
    """Return the track of a rank. A message is under way from its start to the end of its wait.

    Args:
        mail: receives the slices of messages between ranks.
    """
    track = Track(name)
    starts: dict[Task, Slice] = {}
    for slot in slots:
        tasks, about = slot.tasks, {"slot": slot.words}
        title = " ".join(map(str, tasks)) or slot.words
        kind, label = ("exposed", f"wait {title}") if slot.kind == "wait" else (slot.kind, title)
        shown = Slice(label, COMPUTE, slot.begin, slot.end, kind, about)
        track.slices.append(shown)
        if slot.kind == "wait":
            for task in tasks:
                start = starts.pop(task)
                under_way = Slice(title, _stream(task), start.begin, slot.end, "under way", _about(task))
                track.slices.append(under_way)
                track.arrows.append(Arrow(start, shown))
        elif slot.kind == "start":
            starts |= dict.fromkeys(tasks, shown)
        if mail is not None:
            for task, peers in zip(tasks, slot.peers, strict=True):
                mail.add(name, task, slot.kind, peers, shown)
    return track


@dataclass
class Mail:
    """The slices of the messages between ranks.

    Attributes:
        ranks: name of a track → its rank.
    """

    ranks: Mapping[str, int]
    _sent: dict[tuple[Task, int, int], list[tuple[str, Slice]]] = field(default_factory=dict)
    _received: dict[tuple[Task, int, int], list[tuple[str, Slice]]] = field(default_factory=dict)

    def add(self, track: str, task: Task, kind: str, peers: Sequence[int], shown: Slice) -> None:
        """Add the start of a send, or the wait for a receive. ``peers``: the ranks at its other ends."""
        for peer in peers:
            own = self.ranks[track]
            if (task.action, kind) == ("S", "start"):
                self._sent.setdefault((task, own, peer), []).append((track, shown))
            elif (task.action, kind) == ("R", "wait"):
                send = Task(f"{task.of}S", task.peer, task.batch, task.stage)
                self._received.setdefault((send, peer, own), []).append((track, shown))

    def arrows(self) -> Iterator[tuple[str, Arrow]]:
        """Yield an arrow from each send to its receive, with the track of the send."""
        for key, ends in self._received.items():
            for (of, sent), (to, received) in zip(self._sent.get(key, ()), ends, strict=True):
                yield of, Arrow(sent, received, to, "message")


def stages_text(stages: Sequence[int]) -> str:
    """Return ``stage 0``, or ``stages 0 2``."""
    return f"stage{'s' * (len(stages) > 1)} {' '.join(map(str, stages))}"


def _stream(message: Task) -> str:
    return f"{'to' if message.action == 'S' else 'from'} stage {message.peer}"


def _about(task: Task) -> Mapping[str, object]:
    return {"stage": task.stage, "micro-batch": task.batch}
