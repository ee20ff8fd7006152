"""Draw a simulation: what each rank computes, sends and receives, where it is idle, and how much memory it uses.

Time runs to the right. A computation shows the number of its micro-batch; the stages of a rank are shades of one
colour. Colours differ in lightness too, so that readers can distinguish them in grey and with colour blindness.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from autopar.pipeline.memory import KINDS
from autopar.pipeline.simulation_data import SimulationData
from autopar.pipeline.timeline import Span
from autopar.pipeline.tracks import COMPUTATIONS, Track, stages_of, title, tracks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours of a rank's first and last stage, and of the numbers on them.
Colour = str | tuple[float, float, float]
COLOURS = {
    "forward": ("#1b4480", "#3a73b8", "white"),
    "backward": ("#d2702f", "#e39a69", "black"),
    "input gradient": ("#eba133", "#f3bd6b", "black"),
    "weight gradient": ("#cfe3a1", "#e6f2cb", "black"),
}
MESSAGES = {"F": ("forward message", "#1b4480"), "B": ("backward message", "#c4571a")}
MEMORY = {"activations": "#a9a9b8", "sends": "#5b4a8a", "receives": "#efc3da"}
IDLE, GREY = "#d8d8d8", "#606060"

# The parts of each rank's height, from its top.
LANES = {"compute": (0.04, 0.38), "sends": (0.42, 0.50), "receives": (0.52, 0.60), "memory": (0.62, 0.97)}
HEADROOM = 0.66  # the largest peak takes this part of its lane; its value is written above it
ARROWS = 64  # more arrows would hide the picture

# Metadata of the file: neither a date nor a version, so that the same simulation gives the same bytes.
METADATA: dict[str, dict[str, None]] = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "autopar", "pdf.fonttype": 42, "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"], "hatch.linewidth": 0.4, "hatch.color": IDLE, "path.simplify": False,
}  # fmt: skip


def draw(simulation: SimulationData, path: str | os.PathLike[str], *, arrows: bool | None = None) -> None:
    """Write a picture, as SVG, PNG or PDF by the path's suffix; the same simulation gives the same bytes.

    Args:
        arrows: whether to draw an arrow from each send to its receive; default: only if there are few.

    Raises:
        TypeError: the argument is not a simulation.
        ValueError: the suffix is none of these.
        ImportError: matplotlib is not installed.
    """
    rank_tracks = tracks(simulation)
    suffix = Path(path).suffix.lower()
    if suffix not in METADATA:
        raise ValueError(f"{os.fspath(path)!r} ends in {suffix!r}; a picture is written as {', '.join(METADATA)}")
    try:
        from matplotlib import style
    except ImportError as error:
        raise ImportError("draw needs matplotlib, which is not installed; pip install 'autopar[picture]'") from error
    with style.context(["default", STYLE]):
        figure = _figure(simulation, rank_tracks, len(simulation.sent) <= ARROWS if arrows is None else arrows)
        figure.savefig(path, format=suffix[1:], dpi=150, metadata=METADATA[suffix])


@dataclass(frozen=True)
class Sheet:
    """Sizes, in inches.

    Attributes:
        width, rank: the length of the time axis, and the height of a rank.
        unit: the width of one unit of time.
        duration: the duration of a typical computation.
    """

    width: float
    rank: float
    unit: float
    duration: float
    left: float = 0.9
    right: float = 0.25
    top: float = 0.62
    bottom: float = 0.95

    @classmethod
    def of(cls, simulation: SimulationData) -> Sheet:
        spans = list(chain.from_iterable(simulation.computed))
        duration = median(span.end - span.start for span in spans) if spans else 1.0
        makespan = simulation.makespan or 1.0
        width = min(max(0.165 * makespan / (duration or makespan), 8.5), 24.0)
        return cls(width, min(max(0.6, 16 / simulation.schedule.ranks), 1.1), width / makespan, duration)

    @property
    def font(self) -> float:
        """The size of most text, in points; smaller if ranks are low."""
        return 8 if self.rank > 0.8 else 6


def _figure(simulation: SimulationData, rank_tracks: Sequence[Track], arrows: bool) -> Figure:
    from matplotlib.figure import Figure

    sheet, ranks = Sheet.of(simulation), len(rank_tracks)
    width, height = sheet.left + sheet.width + sheet.right, sheet.top + ranks * sheet.rank + sheet.bottom
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes(
        (sheet.left / width, sheet.bottom / height, sheet.width / width, ranks * sheet.rank / height)
    )
    begin = min((spans[0].start for spans in simulation.computed if spans), default=0.0)
    end = begin + (simulation.makespan or 1.0)
    axes.set_xlim(begin, end)
    axes.set_ylim(ranks, 0)
    _idle(axes, ranks, begin, end)
    _computations(axes, simulation, rank_tracks, sheet)
    _messages(axes, rank_tracks, arrows)
    _memory(axes, simulation, rank_tracks, sheet, end)
    _frame(axes, simulation, sheet)
    figure.text(sheet.left / width, 1 - 0.25 / height, title(simulation), fontsize=12, weight="bold", va="center")
    figure.text(sheet.left / width, 1 - 0.46 / height, _numbers(simulation), fontsize=9, va="center", color=GREY)
    _legend(figure, simulation, rank_tracks, sheet)
    return figure


def _idle(axes: Axes, ranks: int, begin: float, end: float) -> None:
    """Hatch the lane of computations: where nothing covers the hatching, the rank is idle."""
    from matplotlib.collections import PolyCollection

    top, bottom = LANES["compute"]
    axes.add_collection(
        PolyCollection([_box(begin, end, rank + top, rank + bottom) for rank in range(ranks)], facecolor="white",
                       edgecolor=IDLE, hatch="/////", linewidth=0, gid="idle", zorder=1), autolim=False,
    )  # fmt: skip


def _computations(axes: Axes, simulation: SimulationData, rank_tracks: Sequence[Track], sheet: Sheet) -> None:
    schedule = simulation.schedule
    top, bottom = LANES["compute"]
    for name in COMPUTATIONS:
        groups: dict[tuple[int, int], list[Span]] = {}
        for rank, track in enumerate(rank_tracks):
            for span in track.computed[name]:
                groups.setdefault((rank, schedule.chunk_of(span.op.stage)), []).append(span)
        boxes = [
            [_box(span.start, span.end, rank + top, rank + bottom) for span in spans]
            for (rank, _), spans in groups.items()
        ]
        shades = [_shade(name, chunk, len(schedule.stages_of[rank])) for rank, chunk in groups]
        _add(axes, boxes, shades, name, edgecolor="white", linewidth=min(0.6, 5 * sheet.unit * sheet.duration))
        for (rank, _), spans in groups.items():
            _batches(axes, spans, rank + (top + bottom) / 2, COLOURS[name][2], sheet)


def _batches(axes: Axes, spans: Sequence[Span], y: float, colour: str, sheet: Sheet) -> None:
    """Write the numbers of micro-batches, all in one size, where they fit."""
    for span in spans:
        text = str(span.op.batch)
        points = 72 * sheet.unit
        # A digit is 0.64 of the size wide.
        size = min(8.0, (points * min(sheet.duration, span.end - span.start) - 1) / (0.64 * max(2, len(text))))
        if size >= 4:
            middle = (span.start + span.end) / 2
            axes.text(
                middle, y, text, fontsize=round(size, 1), color=colour, ha="center", va="center_baseline", zorder=3
            )


def _messages(axes: Axes, rank_tracks: Sequence[Track], arrows: bool) -> None:
    for of, (name, colour) in MESSAGES.items():
        boxes = []
        for lane, ends in (
            ("sends", [track.sent for track in rank_tracks]),
            ("receives", [track.received for track in rank_tracks]),
        ):
            low, high = _half(lane, of)
            boxes += [
                [_box(s.start, s.end, rank + low, rank + high) for s in spans if s.op.of == of]
                for rank, spans in enumerate(ends)
            ]
        _add(axes, boxes, [colour] * len(boxes), name, edgecolor=colour, linewidth=0.4)
        if arrows:
            _arrows(axes, [span for track in rank_tracks for span in track.sent if span.op.of == of], of, colour)


def _arrows(axes: Axes, spans: Sequence[Span], of: str, colour: str) -> None:
    from matplotlib.collections import LineCollection

    out, back = (sum(_half(lane, of)) / 2 for lane in ("sends", "receives"))
    lines = [[(span.start, span.link[0] + out), (span.end, span.link[1] + back)] for span in spans]
    axes.add_collection(
        LineCollection(lines, colors=colour, linewidths=0.5, alpha=0.7, zorder=4, gid=f"{MESSAGES[of][0]} arrows"),
        autolim=False,
    )
    for marker, down in (("v", True), ("^", False)):
        if ends := [end for start, end in lines if (end[1] > start[1]) == down]:
            x, y = zip(*ends, strict=True)
            axes.scatter(x, y, s=7, marker=marker, color=colour, linewidths=0, zorder=4)


def _memory(axes: Axes, simulation: SimulationData, rank_tracks: Sequence[Track], sheet: Sheet, end: float) -> None:
    """Draw the kinds of memory stacked, all ranks on one scale, with a triangle at the first time of the peak."""
    from matplotlib.collections import LineCollection, PolyCollection

    top, bottom = LANES["memory"]
    scale = HEADROOM * (bottom - top) / (max((max(track.total) for track in rank_tracks), default=0.0) or 1.0)
    low = [np.zeros(len(track.times)) for track in rank_tracks]
    for kind in KINDS:
        high = [base + np.array(track.bytes[kind]) for base, track in zip(low, rank_tracks, strict=True)]
        areas = [
            _area(track.times, rank + bottom - scale * under, rank + bottom - scale * over, end)
            for rank, (track, under, over) in enumerate(zip(rank_tracks, low, high, strict=True))
            if np.any(over > under)
        ]  # fmt: skip
        axes.add_collection(
            PolyCollection(areas, facecolor=MEMORY[kind], linewidth=0, gid=kind, zorder=2), autolim=False
        )
        low = high
    # The outline also shows memory that is in use for no time at all, which may be the peak.
    lines = [
        _steps(track.times, rank + bottom - scale * total, end)
        for rank, (track, total) in enumerate(zip(rank_tracks, low, strict=True))
    ]
    axes.add_collection(LineCollection(lines, colors=GREY, linewidths=0.4, zorder=2), autolim=False)
    left, right = axes.get_xlim()
    for rank, (track, total) in enumerate(zip(rank_tracks, low, strict=True)):
        at = int(np.argmax(total))
        y = rank + bottom - scale * total[at]
        time = track.times[at]
        text = f"peak {_short(simulation.peak[rank])}" + (f" ({_short(track.fixed)} fixed)" if track.fixed else "")
        nearby = (time - left) * sheet.unit, (right - time) * sheet.unit
        side = "left" if nearby[0] < 0.7 else "right" if nearby[1] < 0.7 else "center"
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.8}
        axes.text(time, y - 0.05, text, fontsize=sheet.font - 1.5, ha=side, va="bottom", zorder=5, bbox=ground)
        axes.scatter([time], [y - 0.025], s=9, marker="v", color="black", linewidths=0, zorder=5, clip_on=False)


def _frame(axes: Axes, simulation: SimulationData, sheet: Sheet) -> None:
    """Draw names of ranks and lanes, lines between ranks, and the time axis."""
    ranks = simulation.schedule.ranks
    for rank, stages in enumerate(simulation.schedule.stages_of):
        names = [(f"rank {rank}", sum(LANES["compute"]) / 2, sheet.font + 1, "black")]
        lanes = ("sends", "receives", "memory") if simulation.sent else ("memory",)
        names += [(lane, sum(LANES[lane]) / 2, sheet.font - 2, GREY) for lane in lanes]
        if 1 < len(stages) < 5:
            names.append((stages_of(simulation.schedule, rank), LANES["compute"][1] - 0.05, sheet.font - 2, GREY))
        for name, y, size, colour in names:
            style: dict[str, Any] = {"fontsize": size, "color": colour, "ha": "right", "va": "center"}
            axes.annotate(name, (0, rank + y), (-6, 0), ("axes fraction", "data"), "offset points", **style)
    axes.hlines(range(1, ranks), 0, 1, transform=axes.get_yaxis_transform(), color=GREY, linewidth=0.5)
    axes.set_yticks([])
    axes.set_xlabel("time", fontsize=8, color=GREY)
    axes.tick_params(labelsize=8, colors=GREY)
    axes.grid(axis="x", color="#eeeeee", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)


def _legend(figure: Figure, simulation: SimulationData, rank_tracks: Sequence[Track], sheet: Sheet) -> None:
    """Draw a row for the computations, and one for messages and memory."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    chunks = simulation.schedule.chunks
    first: list[tuple[Any, str]] = [
        (tuple(Patch(color=_shade(name, chunk, chunks)) for chunk in range(chunks)), name)
        for name in COMPUTATIONS
        if any(track.computed[name] for track in rank_tracks)
    ]
    first.append((Patch(facecolor="white", edgecolor="#b0b0b0", hatch="/////", linewidth=0.4), "idle"))
    if chunks > 1:
        first.append((Patch(alpha=0), "(shades: the stages of a rank, in order)"))
    sent_passes = {span.op.of for span in simulation.sent}
    second: list[tuple[Any, str]] = [
        (Patch(color=colour, linewidth=0), name) for of, (name, colour) in MESSAGES.items() if of in sent_passes
    ]
    second += [
        (Patch(color=MEMORY[kind]), f"memory: {kind}")
        for kind in KINDS
        if any(any(track.bytes[kind]) for track in rank_tracks)
    ]
    width, height = figure.get_size_inches()
    for entries, y in ((first, 0.3), (second, 0.08)):
        figure.legend(
            [handle for handle, _ in entries], [name for _, name in entries], loc="lower left",
            bbox_to_anchor=(sheet.left / width, y / height), ncols=max(1, len(entries)), fontsize=8, frameon=False,
            handler_map={tuple: HandlerTuple(ndivide=None, pad=0)}, handlelength=1.6,
            columnspacing=1.2, borderpad=0, borderaxespad=0,
        )  # fmt: skip


def _numbers(simulation: SimulationData) -> str:
    parts = [
        f"makespan {_short(simulation.makespan)}",
        f"bubble {_short(simulation.bubble)} ({simulation.bubble_rate:.1%})",
    ]
    if simulation.span_bubble < simulation.bubble - 1e-9 * simulation.makespan:
        parts.append(f"of the longest rank {_short(simulation.span_bubble)} ({simulation.span_bubble_rate:.1%})")
    return ", ".join([*parts, f"exposed transfers at most {_short(max(simulation.exposed))} on a rank"])


# -- shapes ------------------------------------------------------------------------------------------------------------


def _box(start: float, end: float, low: float, high: float) -> list[tuple[float, float]]:
    return [(start, low), (end, low), (end, high), (start, high)]


def _half(lane: str, of: str) -> tuple[float, float]:
    """Return the half of a lane: forward messages are in the upper half, backward ones in the lower."""
    top, bottom = LANES[lane]
    middle = (top + bottom) / 2
    return (top, middle - 0.005) if of == "F" else (middle + 0.005, bottom)


def _steps(times: Sequence[float], values: np.ndarray, end: float) -> np.ndarray:
    return np.column_stack([np.repeat([*times, end], 2)[1:-1], np.repeat(values, 2)])


def _area(times: Sequence[float], low: np.ndarray, high: np.ndarray, end: float) -> np.ndarray:
    """Return the area between two lines of steps; parts without width are dropped."""
    after = np.array([*times[1:], end])
    changed = np.flatnonzero(after > times)
    same = (np.diff(low[changed], prepend=np.nan) == 0) & (np.diff(high[changed], prepend=np.nan) == 0)
    kept = changed[~same]
    at = np.array(times)[kept]
    return np.concatenate([_steps(at, high[kept], end), _steps(at, low[kept], end)[::-1]])


Box = list[tuple[float, float]]  # its corners


def _add(axes: Axes, boxes: Iterable[Sequence[Box]], colours: Sequence[Colour], gid: str, **style: Any) -> None:
    """Add boxes, with one path for each colour, so that pictures of many thousand boxes stay small."""
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path as Shape

    pairs = [
        (Shape.make_compound_path_from_polys(np.array(polygons)), colour)
        for polygons, colour in zip(boxes, colours, strict=True)
        if polygons
    ]
    axes.add_collection(
        PathCollection([p for p, _ in pairs], facecolor=[c for _, c in pairs], gid=gid, zorder=2, **style),
        autolim=False,
    )


def _shade(name: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    first, last = to_rgb(COLOURS[name][0]), to_rgb(COLOURS[name][1])
    part = chunk / (chunks - 1) if chunks > 1 else 0.0
    red, green, blue = (a + part * (b - a) for a, b in zip(first, last, strict=True))
    return red, green, blue


def _short(number: float) -> str:
    """Write four digits, with a prefix from ten thousand on: ``12.34``, ``16.78 M``."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 10 * factor:
            return f"{number / factor:.4g} {prefix}"
    return f"{number:.4g}"
