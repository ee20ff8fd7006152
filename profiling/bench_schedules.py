"""Measure pipeline schedules: each policy on ranks x micro-batches, simulated and verified, and a large one.

Times are those of a rank, by default a published 1.5B model's in ms; a stage of a rank that has several takes its share
of them. Bubble: of the makespan, and of the longest span of a single rank. Live: micro-batches whose activations a rank
keeps, the least and the most of all ranks. Peak: of the rank with most, activations and message buffers, an activation
of a micro-batch on a rank being one and a boundary tensor --boundary; per m: how much that grows with one more
micro-batch. Exposed: what ranks wait for messages on their way, of ranks x makespan. Finishes: the strictest channels
on which all ranks do. Within: the optimising policy with a limit of memory, its makespan over a lower bound, and the
best policy within that limit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from profilers import positive

from autopar.pipeline import POLICIES, PipelineSchedule, build, optimise
from autopar.pipeline.buffers import Flow
from autopar.pipeline.lowering import lower
from autopar.pipeline.memory import Sizes, memory
from autopar.pipeline.simulate import Simulation, Times, simulate
from autopar.pipeline.verify import verify

LINES = [simulate, memory, lower, Flow.first_after, verify]
STRICT = ("blocking", "grouped", "1-buffered", "asynchronous")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sizes",
        type=positive,
        nargs=2,
        action="append",
        metavar=("RANKS", "BATCHES"),
        help="default: 4 8, 8 8, 8 32, 8 64, 16 64",
    )
    parser.add_argument(
        "--times", type=float, nargs=4, default=[18.522, 18.086, 9.337, 0.601], metavar=("F", "B", "W", "C")
    )
    parser.add_argument("--boundary", type=float, default=0.02)
    parser.add_argument("--large", type=positive, nargs=2, default=[64, 1024], metavar=("RANKS", "BATCHES"))


def run(options: argparse.Namespace) -> str:
    f, b, w, c = options.times
    lines = [f"F = {f}, B = {b}, W = {w}, c = {c}; boundary {options.boundary}", ""]
    for ranks, batches in options.sizes or [(4, 8), (8, 8), (8, 32), (8, 64), (16, 64)]:
        print(f"p = {ranks}, m = {batches}", file=sys.stderr, flush=True)
        lines.append(f"p = {ranks}, m = {batches}")
        lines.append(
            f"{'policy':18}{'chunks':>7}{'makespan':>10}{'bubble':>9}{'span':>9}{'live':>12}{'peak':>8}{'per m':>8}"
            f"{'exposed':>9}  finishes"
        )
        for name in POLICIES:
            lines.append(_row(name, ranks, batches, options))
        lines += [*_optimised(ranks, batches, options), ""]
    return "\n".join([*lines, _large(options)])


def _row(name: str, ranks: int, batches: int, options: argparse.Namespace) -> str:
    schedule = build(name, ranks, batches)
    simulation = _simulated(schedule, options)
    more = _simulated(build(name, ranks, batches + ranks), options)
    live = simulation.memory.live
    found = schedule.verify().finishes
    return (
        f"{name:18}{schedule.chunks:7}{simulation.makespan:10.1f}{simulation.bubble_rate:9.2%}"
        f"{simulation.span_bubble_rate:9.2%}{f'{min(live):g}–{max(live):g}':>12}{max(simulation.peak):8.2f}"
        f"{(max(more.peak) - max(simulation.peak)) / ranks:8.2f}"
        f"{sum(simulation.exposed) / ranks / simulation.makespan:9.2%}  "
        f"{next(channels for channels in STRICT if not found[channels])}"
    )


def _optimised(ranks: int, batches: int, options: argparse.Namespace) -> Iterator[str]:
    for chunks, limit in ((1, ranks), (1, (3 * ranks) // 2), (1, 2 * ranks - 1), (2, ranks)):
        times, sizes = _given(chunks, options)
        limit += 25 * options.boundary  # messages
        found, seconds = _timed(lambda chunks=chunks, times=times, sizes=sizes, limit=limit: optimise(
            times, ranks, batches, chunks=chunks, sizes=sizes, limit=limit
        ))  # fmt: skip
        run = found.simulation
        best = "none fits" if found.best_fixed is None else f"{found.best_fixed[0]} {found.best_fixed[1]:.1f}"
        yield (
            f"{f'within {limit:g}':18}{chunks:7}{run.makespan:10.1f}{run.bubble_rate:9.2%}{run.span_bubble_rate:9.2%}"
            f"{f'{min(run.memory.live):g}–{max(run.memory.live):g}':>12}{max(run.peak):8.2f}{'':8}"
            f"{sum(run.exposed) / ranks / run.makespan:9.2%}  {found.ratio:.4f} of the bound; best fixed {best}; "
            f"{seconds:.1f} s"
        )


def _simulated(schedule: PipelineSchedule, options: argparse.Namespace) -> Simulation:
    return schedule.simulate(*_given(schedule.chunks, options))


def _given(chunks: int, options: argparse.Namespace) -> tuple[Times, Sizes]:
    """Those of a stage, of a rank that has so many."""
    f, b, w, c = options.times
    return Times(f / chunks, b / chunks, w / chunks, c), Sizes(activation=1 / chunks, boundary=options.boundary)


def _large(options: argparse.Namespace) -> str:
    ranks, batches = options.large
    lines = [
        f"p = {ranks}, m = {batches}: seconds",
        f"{'policy':18}{'tasks':>9}{'build':>8}{'simulate':>10}{'verify':>8}{'bubble':>9}",
    ]
    for name in POLICIES:
        schedule, built = _timed(lambda name=name: build(name, ranks, batches))
        simulation, simulated = _timed(lambda schedule=schedule: _simulated(schedule, options))
        _, verified = _timed(schedule.verify)
        tasks = sum(1 for _ in schedule.tasks())
        lines.append(f"{name:18}{tasks:9}{built:8.2f}{simulated:10.2f}{verified:8.2f}{simulation.bubble_rate:9.2%}")
    return "\n".join(lines)


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start
