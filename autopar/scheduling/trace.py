"""Make the tracks of schedules, as ``autopar.traces`` writes them for Perfetto.

The thread ``compute`` shows computations, and exposed communication in a colour of its own. Each stream has a thread
for its messages. An arrow leads from a message to the wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autopar.errors import shown
from autopar.scheduling.lines import Line
from autopar.scheduling.op import COMPUTE
from autopar.scheduling.simulation import Schedule
from autopar.traces import Arrow, Slice, Track


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
