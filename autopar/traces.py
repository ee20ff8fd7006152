"""Write tracks of slices and arrows as a trace in Chrome's format, which Perfetto (ui.perfetto.dev) shows.

Each track is a process of the trace: a simulation, or a rank. Its thread ``compute`` shows computations; each stream of
messages has a thread of its own. Arrows lead from one slice to another, and counters show the memory in use.

Source: "Trace Event Format", the document of the Chromium project.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from autopar.errors import shown

Event = dict[str, Any]
COMPUTE = "compute"  # the thread of computations
# kind of a slice → a name of Chrome's palette: pale, blue, grey, orange, orange, red; of passes blue, orange, green
COLOURS = {"module": "generic_work", "compute": "rail_response", "start": "grey", "message": "rail_load",
           "under way": "rail_load", "exposed": "terrible", "forward": "rail_response", "backward": "rail_idle",
           "input gradient": "rail_idle", "weight gradient": "rail_load"}  # fmt: skip
OVERLAPPING = "under way"  # messages of which only start and wait are known


class Slice(NamedTuple):
    """A span of time of a thread.

    Attributes:
        name: its label.
        thread: ``compute``, or a stream.
        begin, end: seconds.
        shows: its kind, a key of ``COLOURS``.
        about: facts that are shown when the slice is selected.
        colour: a name of Chrome's palette; empty for that of its kind.
    """

    name: str
    thread: str
    begin: float
    end: float
    shows: str
    about: Mapping[str, Any] = {}
    colour: str = ""


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
    """One process of a trace. Slices of one thread do not overlap, but messages may, and a slice may lie in another.

    Attributes:
        label: what is written beside its name.
        memory: seconds, and kind → the memory in use from then on.
    """

    name: str
    slices: list[Slice] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    label: str = ""
    memory: Sequence[tuple[float, Mapping[str, float]]] = ()


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
    threads = count(1)  # no two processes share the number of a thread
    # Perfetto takes process 0 for the idle one
    places = {track.name: _Place(process, _threads(track, threads)) for process, track in enumerate(tracks, 1)}
    for track in tracks:
        place = places[track.name]
        events += _names(track, place)
        for slice in track.slices:
            events += _events(place, slice, numbers)
        for arrow in track.arrows:
            events += _arrow(place, places[arrow.to] if arrow.to else place, arrow, next(numbers))
        for seconds, bytes in track.memory:
            ts = _nanoseconds(seconds) / 1000
            events.append({"ph": "C", "pid": place.process, "name": "memory", "ts": ts, "args": dict(bytes)})
    return {"displayTimeUnit": "ms", "otherData": dict(about or {}), "traceEvents": events}


def save_trace(tracks: Sequence[Track], path: str | os.PathLike[str], about: Mapping[str, Any] | None = None) -> None:
    """Write the trace as JSON."""
    text = json.dumps(trace(tracks, about), allow_nan=False, separators=(",", ":"))
    Path(path).write_text(text + "\n", encoding="utf-8")


def _names(track: Track, place: _Place) -> Iterator[Event]:
    process = {"ph": "M", "pid": place.process}
    yield {**process, "name": "process_name", "args": {"name": track.name}}
    if track.label:
        yield {**process, "name": "process_labels", "args": {"labels": track.label}}
    yield {**process, "name": "process_sort_index", "args": {"sort_index": place.process - 1}}
    for name, thread in place.threads.items():
        yield {**process, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {**process, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _events(place: _Place, slice: Slice, numbers: Iterator[int]) -> Iterator[Event]:
    """Yield a slice; one that may overlap others of its thread is two events with a number of its own."""
    begin, end = _nanoseconds(slice.begin), _nanoseconds(slice.end)
    event = {"pid": place.process, "tid": place.threads[slice.thread], "name": slice.name, "cat": slice.shows,
             "cname": slice.colour or COLOURS[slice.shows], "args": dict(slice.about)}  # fmt: skip
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


def _threads(track: Track, numbers: Iterator[int]) -> dict[str, int]:
    return {name: next(numbers) for name in dict.fromkeys([COMPUTE, *(slice.thread for slice in track.slices)])}


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
