"""Write tracks of computation and communication as a trace in Chrome's format, which Perfetto (ui.perfetto.dev) shows.

Each track is a process of the trace: a simulation, or a rank. Its thread ``compute`` shows computations, and exposed
communication in a colour of its own. Each stream has a thread for its messages. An arrow leads from a message to the
wait for it.

Source: "Trace Event Format", the document of the Chromium project.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from autopar.errors import shown
from autopar.scheduling.lines import Line
from autopar.scheduling.op import COMPUTE
from autopar.scheduling.simulation import Schedule

Event = dict[str, Any]
# kind of a slice → a name of Chrome's palette: pale, blue, grey, orange, orange, red
COLOURS = {"module": "generic_work", "compute": "rail_response", "start": "grey", "message": "rail_load",
           "under way": "rail_load", "exposed": "terrible"}  # fmt: skip
OVERLAPPING = "under way"  # messages of which only start and wait are known


class Slice(NamedTuple):
    """A span of time of a thread.

    Attributes:
        name: its label.
        thread: ``compute``, or a stream.
        begin, end: seconds.
        shows: its kind, a key of ``COLOURS``.
        about: facts that are shown when the slice is selected.
    """

    name: str
    thread: str
    begin: float
    end: float
    shows: str
    about: Mapping[str, Any] = {}


class Arrow(NamedTuple):
    """An arrow from one slice to another.

    Attributes:
        to: the name of the track of ``end``; empty if it is that of ``begin``.
        name: what it stands for.
    """

    begin: Slice
    end: Slice
    to: str = ""
    name: str = "wait"


@dataclass
class Track:
    """One process of a trace. Slices of one thread do not overlap, but messages may, and a slice may lie in another."""

    name: str
    slices: list[Slice] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)


def simulated_track(name: str, schedules: Iterable[tuple[str, Schedule]]) -> Track:
    """Return the track of schedules that run one after the other, each with the name of its function."""
    track, since = Track(name), 0.0
    if isinstance(schedules, Schedule):
        raise TypeError(f"give pairs of a name and a schedule, such as [({schedules.policy!r}, schedule)]")
    for pair in schedules:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(f"{shown(pair)} is no pair of a name and a schedule, such as ('step', schedule)")
        what, schedule = pair
        _add(track, what, schedule, since)
        since += schedule.makespan
    return track


def trace(tracks: Sequence[Track], about: Mapping[str, Any] | None = None) -> Event:
    """Return the trace as a dict that ``json`` can write. Linear in the slices.

    Args:
        about: facts about the whole trace, for ``otherData``.

    Raises:
        TypeError: there is something else than tracks.
    """
    for track in tracks:
        if not isinstance(track, Track):
            raise TypeError(f"a trace shows tracks, as simulated_track makes them, not {shown(track)}")
    events: list[Event] = []
    numbers = count(1)
    places = {track.name: _Place(process, _threads(track)) for process, track in enumerate(tracks, 1)}
    for process, track in enumerate(tracks, 1):  # Perfetto takes process 0 for the idle one
        place = _Place(process, _threads(track))
        events += _names(process, track, place.threads)
        for slice in track.slices:
            events += _events(process, place.threads, slice, numbers)
        for arrow in track.arrows:
            events += _arrow(place, places[arrow.to] if arrow.to else place, arrow, next(numbers))
    return {"displayTimeUnit": "ms", "otherData": dict(about or {}), "traceEvents": events}


def save_trace(tracks: Sequence[Track], path: str | os.PathLike[str], about: Mapping[str, Any] | None = None) -> None:
    """Write the trace as JSON."""
    text = json.dumps(trace(tracks, about), allow_nan=False, separators=(",", ":"))
    Path(path).write_text(text + "\n", encoding="utf-8")


def _add(track: Track, what: str, schedule: Schedule, since: float) -> None:
    """Add a schedule that begins at a time. A wait that blocks is a slice up to what is computed next."""
    spans = iter(schedule.spans)
    messages: dict[Line, Slice] = {}
    free = since
    for line in schedule.lines:
        if line.kind == "wait":
            free = _wait(track, messages[line], free, what)
            continue
        span = next(spans)
        title = " ".join(dict.fromkeys(part.op for part in line.parts))
        about: dict[str, Any] = {"function": what}
        if line.kind == "compute":
            track.slices.append(Slice(title, COMPUTE, since + span.begin, since + span.end, "compute", about))
            free = since + span.end
            continue
        if schedule.start_seconds:
            track.slices.append(Slice(f"start {title}", COMPUTE, free, free + schedule.start_seconds, "start", about))
            free += schedule.start_seconds
        about |= {"bytes": sum(part.end - part.begin for part in line.parts)}
        message = Slice(title, span.stream, since + span.begin, since + span.end, "message", about)
        track.slices.append(message)
        messages[Line("wait", line.parts)] = message


def _wait(track: Track, message: Slice, begin: float, what: str) -> float:
    """Add the wait for a message, if it blocks what is computed next. Return when it ends."""
    if message.end <= begin:
        return begin
    wait = Slice(f"wait {message.name}", COMPUTE, begin, message.end, "exposed", {"function": what})
    track.slices.append(wait)
    track.arrows.append(Arrow(message, wait))
    return message.end


def _names(process: int, track: Track, threads: Mapping[str, int]) -> Iterator[Event]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": track.name}}
    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
    for name, thread in threads.items():
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _events(process: int, threads: Mapping[str, int], slice: Slice, numbers: Iterator[int]) -> Iterator[Event]:
    """Yield a slice; one that may overlap others of its thread is two events with a number of its own."""
    begin, end = _nanoseconds(slice.begin), _nanoseconds(slice.end)
    event = {"pid": process, "tid": threads[slice.thread], "name": slice.name, "cat": slice.shows,
             "cname": COLOURS[slice.shows], "args": dict(slice.about)}  # fmt: skip
    if slice.shows != OVERLAPPING:
        yield {"ph": "X", **event, "ts": begin / 1000, "dur": (end - begin) / 1000}
        return
    number = next(numbers)
    yield {"ph": "b", "id": number, **event, "cat": slice.thread, "ts": begin / 1000}
    yield {"ph": "e", "id": number, **event, "cat": slice.thread, "ts": end / 1000}


class _Place(NamedTuple):
    """The number of a process, and those of its threads by name."""

    process: int
    threads: Mapping[str, int]


def _threads(track: Track) -> dict[str, int]:
    return {name: k for k, name in enumerate(dict.fromkeys([COMPUTE, *(s.thread for s in track.slices)]), 1)}


def _arrow(begin_at: _Place, end_at: _Place, arrow: Arrow, number: int) -> Iterator[Event]:
    """Yield both ends of an arrow, inside the slices: on their edges it might bind to the next ones.

    It does not lead back in time, where both slices last that long.
    """
    latest = max(_nanoseconds(arrow.end.begin), _nanoseconds(arrow.end.end) - 1)
    at = max(_nanoseconds(arrow.begin.begin), min(_inside(arrow.begin, 1), latest))
    head = max(_inside(arrow.end, 3), min(at, latest))
    for ph, place, slice, ts in (("s", begin_at, arrow.begin, at), ("f", end_at, arrow.end, head)):
        flow = {"ph": ph, "pid": place.process, "tid": place.threads[slice.thread], "ts": ts / 1000, "id": number,
                "name": arrow.name, "cat": arrow.name}  # fmt: skip
        yield {**flow, "bp": "e"} if ph == "f" else flow


def _inside(slice: Slice, quarters: int) -> int:
    begin, end = _nanoseconds(slice.begin), _nanoseconds(slice.end)
    return begin + (end - begin) * quarters // 4


def _nanoseconds(seconds: float) -> int:
    """Convert to whole nanoseconds, so that adjacent slices do not overlap by rounding."""
    return round(seconds * 1e9)
