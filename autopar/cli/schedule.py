"""Run ``autopar schedule``: make or load a schedule, verify and simulate it, and print, draw or save it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from autopar.cli.files import check_writable
from autopar.cli.output import OutputOptions, output_of
from autopar.cli.status import DONE, status_of
from autopar.errors import ScheduleError
from autopar.pipeline.bounds import OBJECTIVES, Objective
from autopar.pipeline.optimiser import NAME as OPTIMISED
from autopar.pipeline.optimiser import optimise
from autopar.pipeline.per_stage import PerStage, Sizes, Times
from autopar.pipeline.picture import METADATA
from autopar.pipeline.policies import build
from autopar.pipeline.schedule import PipelineSchedule

RANKS, BATCHES = 4, 8  # defaults for the schedule of a policy


@dataclass(frozen=True, kw_only=True)
class Request(OutputOptions):
    """The options of ``autopar schedule`` and their defaults.

    A text of numbers has one number for all stages, or one for each: ``18.5,18.5,22``.
    """

    source: str = "1f1b"
    ranks: int | None = None
    batches: int | None = None
    chunks: int | None = None
    forward: str = "1"
    backward: str = "1"
    weight: str = "1"
    transfer: str = "0"
    rendezvous: bool = False
    overlap: float = 0.0
    activation: str = "1"
    for_weights: str | None = None
    boundary: str = "0"
    recompute: bool = False
    limit: float | None = None
    objective: Objective = OBJECTIVES[0]
    down: bool = False
    events: bool = False
    draw: str | None = None
    trace: str | None = None
    save: str | None = None


def run(request: Request) -> int:
    """Run with the options and return the exit status. An error is printed as one line, without a traceback."""
    return status_of(partial(_follow, request))


def _follow(request: Request) -> int:
    output = output_of(request)
    for path, known in ((request.draw, tuple(METADATA)), (request.save, (".json", ".csv"))):
        if path and Path(path).suffix.lower() not in known:
            raise ScheduleError(f"{path}: its name ends in {', '.join(known)}")
    for option in ("draw", "trace", "save"):
        check_writable(f"--{option}", getattr(request, option))
    ranks = RANKS if request.ranks is None else request.ranks
    batches = BATCHES if request.batches is None else request.batches
    from_file = Path(request.source).suffix.lower()
    if from_file in (".json", ".csv"):
        for name in ("ranks", "batches", "chunks", *(["recompute"] if from_file == ".json" else [])):
            if getattr(request, name) not in (None, False):
                raise ScheduleError(f"--{name} is not for a file: {request.source} has its own; leave it out")
    durations = (numbers(getattr(request, name), name) for name in ("forward", "backward", "weight", "transfer"))
    times = Times(*durations, rendezvous=request.rendezvous, overlap=request.overlap)
    later = None if request.for_weights is None else numbers(request.for_weights, "for-weights")
    sizes = Sizes(
        activation=numbers(request.activation, "activation"),
        for_weights=later,
        boundary=numbers(request.boundary, "boundary"),
    )
    optimised = None
    if request.source in (OPTIMISED, "optimized"):
        if request.recompute:
            raise ScheduleError(f"--recompute is not for {OPTIMISED}: add the times of forwards to those of backwards")
        optimised = optimise(times, ranks, batches, chunks=1 if request.chunks is None else request.chunks, sizes=sizes,
                             limit=request.limit, objective=request.objective)  # fmt: skip
        schedule = optimised.schedule
    elif request.limit is not None:
        raise ScheduleError(f"--limit is for autopar schedule {OPTIMISED}: {request.source} has a fixed memory need")
    elif request.objective != OBJECTIVES[0]:
        raise ScheduleError(f"--objective is for autopar schedule {OPTIMISED}: {request.source} has a fixed order")
    elif from_file:
        schedule = PipelineSchedule.load(
            request.source, **({"recompute": True} if request.recompute else {})
        ).with_messages()
    else:
        schedule = build(request.source, ranks, batches, request.chunks, recompute=request.recompute)
    report = schedule.verify()
    simulation = schedule.simulate(times, sizes)
    output.text.print(schedule.table(events=request.events, down=request.down), soft_wrap=True)
    output.text.print(f"\n{simulation}{report}", soft_wrap=True)
    if optimised is not None:
        output.text.print(f"\n{optimised}", soft_wrap=True)
    if request.draw:
        simulation.draw(request.draw)
    if request.trace:
        simulation.save_trace(request.trace)
    if request.save:
        schedule.save(request.save)
    output.give(
        {
            "schedule": schedule.name, "ranks": schedule.ranks, "batches": schedule.batches,
            "makespan": simulation.makespan, "bubble": simulation.bubble_rate, "span": simulation.span,
            "span_bubble": simulation.span_bubble_rate, "work": simulation.work, "exposed": simulation.exposed,
            "peak": simulation.peak,
        }
    )  # fmt: skip
    return DONE


def numbers(text: str, name: str) -> PerStage:
    """Parse ``2`` or ``2,2,3``."""
    try:
        values: Sequence[float] = [float(word) for word in text.split(",")]
    except ValueError:
        raise ScheduleError(f"--{name} {text}: write a number, or one for each stage: 18.5,18.5,22") from None
    return values[0] if len(values) == 1 else values
