"""Write a simulation as a trace in Chrome's format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

Each rank is a process. One thread shows its computations, and each link to or from another rank has a thread of its
own, since messages of several links may be on their way at once. An arrow leads from each send to its receive, and
counters show the memory in use. An arrow binds to slices, and a viewer neither shows nor binds a slice without length:
so a message that takes no time is drawn with a short length.

Source: "Trace Event Format", the document of the Chromium project.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from autopar.pipeline.memory import KINDS
from autopar.pipeline.simulation_data import SimulationData
from autopar.pipeline.task import PASSES, other_end
from autopar.pipeline.timeline import Span
from autopar.pipeline.tracks import Track, stages_of, title, tracks

# Names of Chrome's palette: blue, orange, green.
COLOURS = {
    "forward": "rail_response",
    "backward": "rail_idle",
    "input gradient": "rail_idle",
    "weight gradient": "rail_load",
}

# a message that takes no time is drawn with this fraction of the makespan, if its neighbours leave as much room
PARTS = 1000

Event = dict[str, Any]
Thread = tuple[int, int, int]  # rank; sender and receiver of a link, or for computations the rank twice


def trace(simulation: SimulationData) -> Event:
    """Return the trace as a dict that ``json`` can write. Linear in the tasks.

    Times are taken as milliseconds and rounded to nanoseconds. The process of a rank is its number plus one, since
    Perfetto takes process 0 for the idle one. Raises:
        TypeError: the argument is not a simulation.
    """
    rank_tracks = tracks(simulation)
    threads = _threads(rank_tracks)
    events = [*_names(simulation, threads)]
    for rank, track in enumerate(rank_tracks):
        for name, spans in track.computed.items():
            events += (
                _slice(span, _times(span), rank, threads[rank, rank, rank], name, COLOURS[name]) for span in spans
            )
        events += _counters(rank, track)
    drawn = _drawn(simulation)
    for number, span in enumerate(simulation.sent):
        events += _message(number, span, drawn[number], threads)
    about = {
        "schedule": title(simulation), "makespan": simulation.makespan, "bubble_rate": simulation.bubble_rate,
        "exposed": list(simulation.exposed), "peak": list(simulation.peak),
    }  # fmt: skip
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def save_trace(simulation: SimulationData, path: str | os.PathLike[str]) -> None:
    """Write the trace as JSON."""
    text = json.dumps(trace(simulation), allow_nan=False, separators=(",", ":"))
    Path(path).write_text(text + "\n", encoding="utf-8")


def _threads(rank_tracks: tuple[Track, ...]) -> dict[Thread, int]:
    """Return a number for each thread, in the order in which they are shown; no two processes share a number."""
    numbers = count(1)
    threads: dict[Thread, int] = {}
    for rank, track in enumerate(rank_tracks):
        threads[rank, rank, rank] = next(numbers)
        for spans in (track.sent, track.received):
            for sender, receiver in sorted({span.link for span in spans}):
                threads[rank, sender, receiver] = next(numbers)
    return threads


def _names(simulation: SimulationData, threads: dict[Thread, int]) -> Iterator[Event]:
    for rank in range(simulation.schedule.ranks):
        process = {"ph": "M", "pid": rank + 1}
        yield {**process, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {**process, "name": "process_labels", "args": {"labels": stages_of(simulation.schedule, rank)}}
        yield {**process, "name": "process_sort_index", "args": {"sort_index": rank}}
    for (rank, sender, receiver), number in threads.items():
        if sender == receiver:
            name = "compute"
        else:
            name = f"sends to rank {receiver}" if rank == sender else f"receives from rank {sender}"
        thread = {"ph": "M", "pid": rank + 1, "tid": number}
        yield {**thread, "name": "thread_name", "args": {"name": name}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": number}}


def _slice(span: Span, drawn: tuple[int, int], rank: int, thread: int, name: str, colour: str, **more: Any) -> Event:
    begin, end = drawn
    args = {"pass": name, "stage": span.op.stage, "micro-batch": span.op.batch, **more}
    return {
        "ph": "X", "pid": rank + 1, "tid": thread, "name": str(span.op), "cat": name, "cname": colour,
        "ts": begin / 1000, "dur": (end - begin) / 1000, "args": args,
    }  # fmt: skip


def _drawn(simulation: SimulationData) -> list[tuple[int, int]]:
    """Return the drawn begin and end of each message in nanoseconds.

    A message is at least one long, and comes after the earlier messages of its link.
    """
    links: dict[Any, list[int]] = defaultdict(list)
    for number, span in enumerate(simulation.sent):
        links[span.stream].append(number)
    short = _nanoseconds(simulation.makespan) // PARTS or PARTS
    drawn = [_times(span) for span in simulation.sent]
    for numbers in links.values():
        later = _later([drawn[number][0] for number in numbers])
        free = 0
        for place, (number, following) in enumerate(zip(numbers, later, strict=True)):
            begin, end = drawn[number]
            begin = max(begin, free)
            if end <= begin:
                room = (
                    short
                    if following == len(numbers)
                    else (drawn[numbers[following]][0] - begin) // (following - place)
                )
                end = begin + max(1, min(short, room))
            drawn[number], free = (begin, end), end
    return drawn


def _later(begins: Sequence[int]) -> list[int]:
    """Return for each begin the position of the next begin that is later."""
    later = list(range(1, len(begins) + 1))
    for place in range(len(begins) - 2, -1, -1):
        if begins[place + 1] == begins[place]:
            later[place] = later[place + 1]
    return later


def _message(number: int, span: Span, drawn: tuple[int, int], threads: dict[Thread, int]) -> Iterator[Event]:
    """Yield both ends of a message and the arrow between them.

    The arrow begins and ends inside the slices: on their edges it might bind to the next ones.
    """
    sender, receiver = span.link
    name = PASSES[span.op.of]
    received = span._replace(op=other_end(span.op))
    begin, end = drawn
    more = {} if span.end > span.start else {"takes no time": True}
    arrow = {"id": number, "name": "message", "cat": "message"}
    for rank, message, ph, part in ((sender, span, "s", 1), (receiver, received, "f", 3)):
        thread = threads[rank, sender, receiver]
        yield {
            **_slice(message, drawn, rank, thread, name, COLOURS[name], peer=message.op.peer, **more),
            "cat": "message",
        }
        flow = {"ph": ph, "pid": rank + 1, "tid": thread, "ts": (begin + (end - begin) * part // 4) / 1000, **arrow}
        yield {**flow, "bp": "e"} if ph == "f" else flow


def _counters(rank: int, track: Track) -> Iterator[Event]:
    fixed = {"fixed": track.fixed} if track.fixed else {}
    for i, time in enumerate(track.times):
        args = {**{kind: track.bytes[kind][i] for kind in KINDS}, **fixed}
        yield {"ph": "C", "pid": rank + 1, "name": "memory", "ts": _nanoseconds(time) / 1000, "args": args}


def _times(span: Span) -> tuple[int, int]:
    return _nanoseconds(span.start), _nanoseconds(span.end)


def _nanoseconds(time: float) -> int:
    """Convert milliseconds to whole nanoseconds, so that adjacent slices do not overlap by rounding."""
    return round(time * 1_000_000)
