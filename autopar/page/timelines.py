"""Give the slices of computed and recorded steps, and the slots of a pipeline, as the page draws them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from autopar.page.subject import Subject
from autopar.pipeline.task import PASSES
from autopar.pipeline.tracks import title, tracks
from autopar.scheduling.op import COMPUTE
from autopar.scheduling.trace import simulated_track
from autopar.traces import Track

SLICES = 12_000  # most slices of a track; of longer steps the first ones are drawn
KINDS = ("compute", "start", "message", "exposed", "forward", "backward", "weight gradient")  # how slices are coloured


class _Names:
    """Number names, so that each is written once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))


def timelines(subject: Subject) -> dict[str, Any] | None:
    """Return ``names``, and ``tracks``, whose ``lanes`` have slices ``[name, begin, duration, kind]`` in microseconds.

    ``None`` if there is nothing to draw.
    """
    names, drawn = _Names(), []
    if subject.communication is not None:
        drawn.append(_track(simulated_track("computed", subject.communication.in_turn()), names))
    if subject.pipeline is not None:
        drawn.append(_slots(subject, names))
    drawn += [_track(track, names) for track in subject.recorded]
    if not any(lane["slices"] for track in drawn for lane in track["lanes"]):
        return None
    return {"names": [*names.numbers], "kinds": list(KINDS), "tracks": drawn}


def _track(track: Track, names: _Names) -> dict[str, Any]:
    lanes: dict[str, list[list[float]]] = {COMPUTE: []}
    for slice in track.slices[:SLICES]:
        kind = KINDS.index("message" if slice.shows == "under way" else slice.shows)
        lanes.setdefault(slice.thread, []).append(_slice(names(slice.name), slice.begin, slice.end, kind))
    return {"name": track.name, "lanes": _lanes(lanes), "left": max(0, len(track.slices) - SLICES)}


def _slots(subject: Subject, names: _Names) -> dict[str, Any]:
    """Return the slots of a pipeline as a track with a lane for each rank along the pipeline."""
    simulation = subject.pipeline
    assert simulation is not None
    lanes: dict[str, list[list[float]]] = {}
    left = 0
    for rank, spans in enumerate(simulation.computed):
        shown = spans[: SLICES // max(1, len(simulation.computed))]
        left += len(spans) - len(shown)
        lanes[f"position {rank}"] = [
            _slice(names(str(span.op)), span.start, span.end, KINDS.index(PASSES[span.op.of])) for span in shown
        ]
    return {"name": f"computed: {title(simulation)}", "lanes": _lanes(lanes), "left": left}


def _slice(name: int, begin: float, end: float, kind: int) -> list[float]:
    return [name, round(begin * 1e6, 3), round((end - begin) * 1e6, 3), kind]


def _lanes(lanes: Mapping[str, Iterable[list[float]]]) -> list[dict[str, Any]]:
    return [{"name": name, "slices": list(slices)} for name, slices in lanes.items()]


def pipeline_memory(subject: Subject) -> list[dict[str, Any]] | None:
    """Return the bytes over time of each rank along the pipeline, times in microseconds; ``None`` without stages."""
    if subject.pipeline is None:
        return None
    return [
        {
            "rank": rank,
            "fixed": track.fixed,
            "times": [round(at * 1e6, 3) for at in track.times],
            "bytes": list(track.total),
        }
        for rank, track in enumerate(tracks(subject.pipeline))
    ]
