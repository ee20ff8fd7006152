"""Collect the contents of a picture or trace for each rank: computations, messages, and memory over time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

from autopar.errors import class_of
from autopar.pipeline.memory import KINDS, MemoryChange
from autopar.pipeline.schedule_table import ScheduleTable
from autopar.pipeline.simulation_data import SimulationData
from autopar.pipeline.task import Slot, Task
from autopar.pipeline.timeline import Span

COMPUTATIONS = ("forward", "backward", "input gradient", "weight gradient")


@dataclass(frozen=True)
class Track:
    """The contents of one rank.

    Attributes:
        computed: its computations by name, one of ``COMPUTATIONS``; a backward computes both gradients.
        sent, received: its messages. Both ends have the whole duration of the transfer.
        times: when memory is allocated or freed, from 0 on, in order. A time may occur more than once, since memory in
            use between two changes at one time counts for the peak.
        bytes: kind → the memory in use from each of the times on.
        fixed: memory in use all the time.
    """

    computed: dict[str, tuple[Span, ...]]
    sent: tuple[Span, ...]
    received: tuple[Span, ...]
    times: tuple[float, ...]
    bytes: dict[str, tuple[float, ...]]
    fixed: float

    @property
    def total(self) -> tuple[float, ...]:
        """Bytes of all kinds, without ``fixed``."""
        return tuple(map(sum, zip(*self.bytes.values(), strict=True)))


def tracks(simulation: SimulationData) -> tuple[Track, ...]:
    """Return the track of each rank. Linear.

    Raises:
        TypeError: the argument is not a simulation.
    """
    if not isinstance(simulation, SimulationData):
        raise TypeError(
            f"{simulation!r:.80} is {class_of(simulation)}; give a Simulation, as schedule.simulate() makes it"
        )
    schedule, memory = simulation.schedule, simulation.memory
    split = schedule.is_split
    sent: dict[int, list[Span]] = defaultdict(list)
    received: dict[int, list[Span]] = defaultdict(list)
    for span in simulation.sent:
        sender, receiver = span.link
        sent[sender].append(span)
        received[receiver].append(span)
    all_tracks = []
    for rank, computed in enumerate(simulation.computed):
        by_name: dict[str, list[Span]] = {name: [] for name in COMPUTATIONS}
        for span in computed:
            by_name[_name(span.op, split)].append(span)
        times, bytes_ = _memory(memory.changes[rank], [row[rank] for row in schedule.slots], computed)
        all_tracks.append(
            Track(
                {name: tuple(spans) for name, spans in by_name.items()}, tuple(sent[rank]), tuple(received[rank]),
                times, bytes_, memory.fixed[rank],
            )
        )  # fmt: skip
    return tuple(all_tracks)


def title(simulation: SimulationData) -> str:
    """Return the title of a simulation: ``zb-h1, 8 ranks, 32 micro-batches``."""
    schedule = simulation.schedule
    parts = [schedule.name or "a schedule", f"{schedule.ranks} rank{'s'[: schedule.ranks > 1]}"]
    if schedule.chunks > 1:
        parts.append(f"{schedule.chunks} stages each")
    return ", ".join([*parts, f"{schedule.batches} micro-batch{'es' if schedule.batches > 1 else ''}"])


def stages_of(schedule: ScheduleTable, rank: int) -> str:
    """Return the stages of a rank in words: ``stage 3``, ``stages 0, 7``."""
    stages = schedule.stages_of[rank]
    return f"stage{'s'[: len(stages) > 1]} {', '.join(map(str, stages))}"


def _name(task: Task, split: bool) -> str:
    if task.kind == "BW":
        return "input gradient" if split else "backward"
    return "forward" if task.kind == "FW" else "weight gradient"


def _memory(
    changes: tuple[MemoryChange, ...], slots: list[Slot], computed: tuple[Span, ...]
) -> tuple[tuple[float, ...], dict[str, tuple[float, ...]]]:
    """Return the time of each change, and the memory in use from then on, by kind.

    A slot begins when the computation before it has ended, and allocates its receive buffers then. It frees send
    buffers after it has waited for its messages, that is when it computes.
    """
    spans: dict[Task, Span] = {span.op: span for span in computed}
    times, deltas, ended = [0.0], {kind: [0.0] for kind in KINDS}, 0.0
    for change in changes:
        if change.task is not None:
            span = spans[change.task]
            time = span.end if change.after else span.start
            ended = span.end
        elif change.kind == "sends" and (tasks := slots[change.time].compute):
            time = spans[tasks[0]].start
        else:
            time = ended
        if change.bytes:
            times.append(max(time, times[-1]))
            for kind, changed in deltas.items():
                changed.append(change.bytes if kind == change.kind else 0.0)
    return tuple(times), {kind: tuple(accumulate(changed)) for kind, changed in deltas.items()}
