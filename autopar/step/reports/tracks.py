"""Make the tracks of a trace: of a computed step, and of what each rank has recorded, with modules around lines.

rank 0
  compute   │ forward                                 │ backward …
            │ layers.0         │ layers.1              │
            │ t  addmm  start… │ wait…  addmm  relu    │
  tp            ╰──── mm_1_tp ──╯
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.pipeline import PipelineSchedule, Task
from autopar.pipeline.simulate import Simulation
from autopar.runtime.recording import RecordedLine, RecordedSlot
from autopar.runtime.spans import Path, module_parts, shared
from autopar.scheduling.op import COMPUTE
from autopar.scheduling.programs.communication import Communication
from autopar.scheduling.trace import simulated_track
from autopar.step.reports.rank_record import RankRecord, stages_text
from autopar.traces import Arrow, Slice, Track

Places = Mapping[str, Mapping[str, tuple[str, str]]]
"""Part of the step → value → its phase and the path of its module."""
MESSAGE, COLLECTIVE = "message", "collective"


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


def simulated_tracks(simulation: Simulation[PipelineSchedule]) -> list[Track]:
    """Return a track for each position along the pipeline: its passes, and the messages that it sends."""
    tracks = []
    for position, spans in enumerate(simulation.computed):
        track = Track(f"simulated {stages_text(simulation.schedule.stages_of[position])}")
        track.slices += [Slice(str(s.op), COMPUTE, s.start, s.end, "compute", _about(s.op)) for s in spans]
        sent = [span for span in simulation.sent if span.link[0] == position]
        track.slices += [Slice(str(s.op), _stream(s.op), s.start, s.end, "message", _about(s.op)) for s in sent]
        tracks.append(track)
    return tracks


class _UnderWay(NamedTuple):
    """A message that a line or a slot starts or waits for.

    Attributes:
        key: what tells it from others on its rank.
        name, stream, about: those of the slice in which it is under way.
        meetings: the keys of ``Meetings`` to which this line or slot belongs.
    """

    key: Hashable
    name: str
    stream: str
    about: Mapping[str, object]
    meetings: Sequence[tuple[str, Hashable]]


@dataclass
class Meetings:
    """Where ranks meet: the starts and waits of the members of collectives, and of both ends of messages.

    A key is the kind of the meeting, which is the name of its arrows, and what tells it from others.
    """

    _members: dict[tuple[str, Hashable], dict[str, list[tuple[Slice | None, Slice | None]]]] = field(
        default_factory=dict
    )

    def add(self, key: tuple[str, Hashable], track: str, start: Slice | None, wait: Slice | None) -> None:
        """Add the start and the wait of one rank; ``None`` for that which others do not meet."""
        self._members.setdefault(key, {}).setdefault(track, []).append((start, wait))

    def arrows(self) -> Iterator[tuple[str, Arrow]]:
        """Yield an arrow from the last start to the waits of other ranks, with the track of that start."""
        for (name, _), members in self._members.items():
            for together in zip(*members.values(), strict=True):  # the first of all, the second of all, …
                ends = dict(zip(members, together, strict=True))
                starts = {track: start for track, (start, _) in ends.items() if start is not None}
                last = max(starts, key=lambda track: starts[track].begin)
                for track, (_, wait) in ends.items():
                    if track != last and wait is not None:
                        yield last, Arrow(starts[last], wait, track, name)


def recorded_track(rank: RankRecord, meetings: Meetings) -> Track:
    """Return the track of a rank: its slots, and its lines. A message is under way from its start to the end of its
    wait.

    Args:
        meetings: receives the starts and waits that other ranks meet.
    """
    track = Track(rank.words)
    shown = [_of_slot(rank.rank, slot) for slots in rank.slots for slot in slots]
    shown += [_of_line(run.name, line) for runs in rank.runs for run in runs for line in run.lines]
    starts: dict[Hashable, Slice] = {}
    for slice, messages in shown:
        track.slices.append(slice)
        waits = slice if slice.shows == "exposed" else None
        for message in messages:
            start = starts.setdefault(message.key, slice) if waits is None else starts.pop(message.key, None)
            if start is None:  # the step before has started it
                continue
            if waits is not None:
                track.slices.append(
                    Slice(message.name, message.stream, start.begin, slice.end, "under way", message.about)
                )
                track.arrows.append(Arrow(start, slice))
            for key in message.meetings:
                receives = key[0] == MESSAGE and waits is not None
                meetings.add(key, track.name, None if receives else start, waits)
    return track


def _of_line(function: str, line: RecordedLine) -> tuple[Slice, list[_UnderWay]]:
    """Return the slice of a line, and its message."""
    about = {"function": function, "module": "/".join(line.path[1:]), "line": line.text}
    if line.kind == "compute":
        return Slice(line.name, COMPUTE, line.begin, line.end, line.kind, about), []
    slice = Slice(f"{line.kind} {line.name}", COMPUTE, line.begin, line.end, _shows(line), about)
    meetings = [(COLLECTIVE, (line.ranks, line.name, line.stream))] if line.kind == "wait" else []
    return slice, [_UnderWay((line.name, line.stream), line.name, line.stream, about, meetings)]


def _of_slot(rank: int, slot: RecordedSlot) -> tuple[Slice, list[_UnderWay]]:
    """Return the slice of a slot, and its messages."""
    title = " ".join(map(str, slot.tasks)) or slot.words
    label = f"wait {title}" if slot.kind == "wait" else title
    peers = dict(zip(slot.tasks, slot.peers, strict=False))
    messages = []
    for task in slot.tasks if slot.kind != "compute" else ():
        meetings: list[tuple[str, Hashable]] = []
        if (task.action, slot.kind) == ("S", "start"):
            meetings = [(MESSAGE, (task, rank, peer)) for peer in peers.get(task, ())]
        elif (task.action, slot.kind) == ("R", "wait"):
            send = Task(f"{task.of}S", task.peer, task.batch, task.stage)
            meetings = [(MESSAGE, (send, peer, rank)) for peer in peers.get(task, ())]
        messages.append(_UnderWay(task, title, _stream(task), _about(task), meetings))
    return Slice(label, COMPUTE, slot.begin, slot.end, _shows(slot), {"slot": slot.words}), messages


def _shows(record: RecordedLine | RecordedSlot) -> str:
    return "exposed" if record.kind == "wait" else record.kind


def track_with_modules(rank: RankRecord, meetings: Meetings) -> Track:
    """Return the track of a rank: steps, slots, modules and lines, which lie in each other."""
    track = recorded_track(rank, meetings)
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
    _put_around(track, inner, [(begin, end) for _, begin, end, _ in around])
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


def _stream(message: Task) -> str:
    return f"{'to' if message.action == 'S' else 'from'} stage {message.peer}"


def _about(task: Task) -> Mapping[str, object]:
    return {"stage": task.stage, "micro-batch": task.batch}
