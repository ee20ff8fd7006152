"""Make the trace of a simulation, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

Each rank is a track. One thread shows its computations, and each link to or from another rank has a thread of its own,
since messages of several links may be on their way at once. An arrow leads from each send to its receive, and counters
show the memory in use. An arrow binds to slices, and a viewer neither shows nor binds a slice without length: so a
message that takes no time is drawn with a short length.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from autopar import traces
from autopar.pipeline.memory import KINDS
from autopar.pipeline.simulation_data import SimulationData
from autopar.pipeline.task import PASSES, Task, other_end
from autopar.pipeline.timeline import Span
from autopar.pipeline.tracks import stages_of, title, tracks
from autopar.traces import COLOURS, COMPUTE, Arrow, Slice

# a message that takes no time is drawn with this fraction of the makespan, if its neighbours leave as much room
PARTS = 1000


def trace(simulation: SimulationData) -> traces.Event:
    """Return the trace as a dict that ``json`` can write. Linear in the tasks.

    Times are taken as milliseconds and rounded to nanoseconds.

    Raises:
        TypeError: the argument is not a simulation.
    """
    return traces.trace(_tracks(simulation), _about(simulation))


def save_trace(simulation: SimulationData, path: str | os.PathLike[str]) -> None:
    """Write the trace as JSON."""
    traces.save_trace(_tracks(simulation), path, _about(simulation))


def _about(simulation: SimulationData) -> dict[str, object]:
    return {
        "schedule": title(simulation), "makespan": simulation.makespan, "bubble_rate": simulation.bubble_rate,
        "exposed": list(simulation.exposed), "peak": list(simulation.peak),
    }  # fmt: skip


def _tracks(simulation: SimulationData) -> list[traces.Track]:
    """Return a track for each rank: its computations, the messages that it sends and receives, its memory."""
    made: list[traces.Track] = []
    for rank, own in enumerate(tracks(simulation)):
        track = traces.Track(f"rank {rank}", label=stages_of(simulation.schedule, rank))
        for name, spans in own.computed.items():
            track.slices += (_slice(span.op, COMPUTE, _times(span), name, name) for span in spans)
        fixed = {"fixed": own.fixed} if own.fixed else {}
        track.memory = [
            (time / 1000, {**{kind: own.bytes[kind][i] for kind in KINDS}, **fixed}) for i, time in enumerate(own.times)
        ]
        made.append(track)
    messages = sorted(zip(simulation.sent, _drawn(simulation), strict=True), key=lambda message: message[0].link)
    ends: tuple[list[Slice], list[Slice]] = [], []
    for end, words in enumerate(("sends to", "receives from")):
        for span, drawn in messages:
            task, about = (
                other_end(span.op) if end else span.op,
                {} if span.end > span.start else {"takes no time": True},
            )
            thread, name = f"{words} rank {span.link[1 - end]}", PASSES[span.op.of]
            ends[end].append(_slice(task, thread, drawn, "message", name, peer=task.peer, **about))
            made[span.link[end]].slices.append(ends[end][-1])
    for (span, _), sent, received in zip(messages, *ends, strict=True):
        made[span.link[0]].arrows.append(Arrow(sent, received, f"rank {span.link[1]}", "message"))
    return made


def _slice(task: Task, thread: str, drawn: tuple[int, int], kind: str, name: str, **more: Any) -> Slice:
    begin, end = (time / 1e9 for time in drawn)
    about = {"pass": name, "stage": task.stage, "micro-batch": task.batch, **more}
    return Slice(str(task), thread, begin, end, kind, about, COLOURS[name])


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


def _times(span: Span) -> tuple[int, int]:
    return _nanoseconds(span.start), _nanoseconds(span.end)


def _nanoseconds(time: float) -> int:
    """Convert milliseconds to whole nanoseconds, so that adjacent slices do not overlap by rounding."""
    return round(time * 1_000_000)
