"""A simulation as a trace in Chrome's format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

Each rank is a process: a thread computes, and each link to or from another rank has one of its own, since messages of several
links may be on their way at once. An arrow leads from each send to its receive, and counters show what memory is in use.

Source: "Trace Event Format", the document of the Chromium project.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from autopar.pipeline.memory import KINDS
from autopar.pipeline.simulate import Simulation
from autopar.pipeline.task import PASSES, other_end
from autopar.pipeline.tracks import Track, stages_of, title, tracks
from autopar.timeline import Span

# Names of Chrome's palette: blue, orange, green.
COLOURS = {"forward": "rail_response", "backward": "rail_idle", "input gradient": "rail_idle", "weight gradient": "rail_load"}

Event = dict[str, Any]
Thread = tuple[int, int, int]  # rank; sender and receiver of a link, or the rank twice: what computes


def trace(simulation: Simulation) -> Event:
    """The trace as what ``json`` writes; linear.

    Times are taken as milliseconds and rounded to nanoseconds. The process of a rank is its number plus one, since process 0
    is the idle one to Perfetto.

    Raises:
        TypeError: it is not a simulation.
    """
    found = tracks(simulation)
    threads = _threads(found)
    events = [*_names(simulation, threads)]
    for rank, track in enumerate(found):
        for name, spans in track.computed.items():
            events += (_slice(span, rank, threads[rank, rank, rank], name, COLOURS[name]) for span in spans)
        events += _counters(rank, track)
    for number, span in enumerate(simulation.sent):
        events += _message(number, span, threads)
    about = {
        "schedule": title(simulation), "makespan": simulation.makespan, "bubble_rate": simulation.bubble_rate,
        "exposed": list(simulation.exposed), "peak": list(simulation.peak),
    }  # fmt: skip
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def save_trace(simulation: Simulation, path: str | os.PathLike[str]) -> None:
    """Write the trace as JSON."""
    text = json.dumps(trace(simulation), allow_nan=False, separators=(",", ":"))
    Path(path).write_text(text + "\n", encoding="utf-8")


def _threads(found: tuple[Track, ...]) -> dict[Thread, int]:
    """A number for each thread, in the order in which they are shown; no two processes share one."""
    numbers = count(1)
    threads: dict[Thread, int] = {}
    for rank, track in enumerate(found):
        threads[rank, rank, rank] = next(numbers)
        for spans in (track.sent, track.received):
            for sender, receiver in sorted({span.stream for span in spans}):  # type: ignore[type-var,misc]
                threads[rank, sender, receiver] = next(numbers)
    return threads


def _names(simulation: Simulation, threads: dict[Thread, int]) -> Iterator[Event]:
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


def _slice(span: Span, rank: int, thread: int, name: str, colour: str, **more: int) -> Event:
    begin, end = _nanoseconds(span.start), _nanoseconds(span.end)
    args = {"pass": name, "stage": span.op.stage, "micro-batch": span.op.batch, **more}
    return {
        "ph": "X", "pid": rank + 1, "tid": thread, "name": str(span.op), "cat": name, "cname": colour, "ts": begin / 1000,
        "dur": (end - begin) / 1000, "args": args,
    }  # fmt: skip


def _message(number: int, span: Span, threads: dict[Thread, int]) -> Iterator[Event]:
    """Both ends, and the arrow. It begins and ends inside of the slices, since on their edges it may bind to the next ones."""
    sender, receiver = span.stream  # type: ignore[misc]
    name = PASSES[span.op.of]
    received = span._replace(op=other_end(span.op))
    begin, end = _nanoseconds(span.start), _nanoseconds(span.end)
    arrow = {"id": number, "name": "message", "cat": "message"}
    for rank, one, ph, part in ((sender, span, "s", 1), (receiver, received, "f", 3)):
        thread = threads[rank, sender, receiver]
        yield {**_slice(one, rank, thread, name, COLOURS[name], peer=one.op.peer), "cat": "message"}
        flow = {"ph": ph, "pid": rank + 1, "tid": thread, "ts": (begin + (end - begin) * part // 4) / 1000, **arrow}
        yield {**flow, "bp": "e"} if ph == "f" else flow


def _counters(rank: int, track: Track) -> Iterator[Event]:
    fixed = {"fixed": track.fixed} if track.fixed else {}
    for i, time in enumerate(track.times):
        args = {**{kind: track.bytes[kind][i] for kind in KINDS}, **fixed}
        yield {"ph": "C", "pid": rank + 1, "name": "memory", "ts": _nanoseconds(time) / 1000, "args": args}


def _nanoseconds(time: float) -> int:
    """Of milliseconds. Whole numbers, so that slices that touch do not overlap by a rounding."""
    return round(time * 1_000_000)
