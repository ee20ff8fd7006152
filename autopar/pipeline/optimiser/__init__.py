"""Search for the shortest schedule for measured times and a memory limit, and prove how good it is.

    optimised = optimise(Times(forward, backward, weight, transfer), ranks=8, batches=32, limit=12)
    print(optimised)

The objective is the makespan, or the longest span of a rank (``objective="span"``). The span counts where ranks do not
wait for each other between steps. The bubble rates of Zero Bubble's automatic schedules are published by the span.

Stages may take unequal times, and messages take time too. The result is a schedule like any other. It is never longer
than the policies that fit into the memory, and comes with a lower bound on the length of all schedules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from autopar.errors import ScheduleError, shown
from autopar.pipeline.bounds import EPSILON, OBJECTIVES, Costs, Objective, costs, lower_bound
from autopar.pipeline.memory import memory
from autopar.pipeline.optimiser.greedy import one_by_one
from autopar.pipeline.optimiser.orders import Orders, Paper, orders_of, schedule_of
from autopar.pipeline.optimiser.peaks import Peaks
from autopar.pipeline.optimiser.search import search, with_joined_backwards
from autopar.pipeline.per_stage import Sizes, Times, kept
from autopar.pipeline.policies import POLICIES, build, loop, vee
from autopar.pipeline.schedule import PipelineSchedule
from autopar.pipeline.shape import counts, whole
from autopar.pipeline.simulate import Simulation, simulate

__all__ = ["NAME", "Optimised", "optimise"]

NAME = "optimised"


@dataclass(frozen=True)
class Optimised:
    """The result of ``optimise``.

    Attributes:
        simulation: the simulation of the schedule.
        best_fixed: the best policy within the limit and its length; ``None`` if no policy is within the limit.
        bound: no schedule with the same placement and within the limit is shorter.
        limit: the most memory of each rank; ``None``: no limit.
        objective: which length is made short: ``makespan`` or ``span``.
    """

    simulation: Simulation[PipelineSchedule]
    best_fixed: tuple[str, float] | None
    bound: float
    limit: tuple[float, ...] | None = None
    objective: Objective = "makespan"

    @property
    def schedule(self) -> PipelineSchedule:
        """The schedule, with messages."""
        return self.simulation.schedule

    @property
    def makespan(self) -> float:
        return self.simulation.makespan

    @property
    def span(self) -> float:
        """The longest span of a single rank."""
        return self.simulation.span

    @property
    def length(self) -> float:
        """The makespan or the span, by the objective."""
        return _length(self.simulation, self.objective)

    @property
    def ratio(self) -> float:
        """The length over the bound: a ratio of 1 proves that no schedule is shorter."""
        return self.length / self.bound if self.bound else 1.0

    def __str__(self) -> str:
        run, schedule = self.simulation, self.schedule
        fixed = "none is within the limit"
        if self.best_fixed is not None:
            name, length = self.best_fixed
            fixed = f"{name}: {length:.6g}, {length / self.length if self.length else 1.0:.3f} times as long"
        within = "" if self.limit is None else f"  of  {_numbers(self.limit)}"
        rows = {
            **({"longest span": f"{run.span:.6g}"} if self.objective == "span" else {}),
            "makespan": f"{run.makespan:.6g}",
            "bubble": f"{run.span_bubble:.6g}, {run.span_bubble_rate:.2%} of the longest span"
            if self.objective == "span"
            else f"{run.bubble:.6g}, {run.bubble_rate:.1%} of the makespan",
            "lower bound": f"{self.bound:.6g}",
            "ratio": f"{self.ratio:.4f}" + (", so nothing is faster" if self.ratio <= 1 + EPSILON else ""),
            "best fixed": fixed,
            "peak memory": _numbers(run.peak) + within,
        }
        placed = (
            "" if schedule.chunks == 1 else f", {schedule.chunks} stages a rank: {' '.join(map(str, schedule.rank_of))}"
        )
        title = f"{schedule.name}: {schedule.ranks} ranks, {schedule.batches} micro-batches{placed}"
        return "\n".join([title, *(f"  {name:<12} {text}" for name, text in rows.items())])


def optimise(times: Times, ranks: int, batches: int, *, chunks: int = 1, sizes: Sizes | None = None,
             limit: float | Iterable[float] | None = None, tries: int = 1000, seed: int = 0,
             objective: Objective = "makespan") -> Optimised:  # fmt: skip
    """Search for the shortest schedule by the objective.

    Among equals it takes the shortest by the other objective, then the one with the least memory. The schedule has
    ``ranks * chunks`` stages, for which ``times`` and ``sizes`` are given. The stages are placed in a loop (``0 1 2 0 1
    2``), or with two on a rank also in a V (``0 1 2 2 1 0``), whichever is shorter. The schedule is compared with the
    policies of the same placement. A backward is split if that helps.

    Args:
        times: the durations of passes and transfers, measured or guessed.
        ranks, batches: p and m.
        chunks: the number of stages on a rank.
        sizes: default: an activation has size 1, and messages have size 0.
        limit: the most memory of every rank, or a list with one number for each, in the unit of ``sizes``; counted as
            ``memory`` counts. ``None``: no limit.
        tries: how long to search: the number of rules to try; a large schedule gets fewer. The result depends on it,
            but not on time.
        seed: the seed of the search's random generator.
        objective: the length to make short: the ``makespan``, or the longest ``span`` of a single rank from its first
            begin to its last end. Where no rank waits for another between two steps, a step costs its span and not its
            makespan.

    Raises:
        TypeError: an argument is of another type.
        ScheduleError: nothing within the limit was found; the error has the smallest limit for which a schedule was
            found.
    """
    sizes = Sizes() if sizes is None else sizes
    for label, value, kind in (("times", times, Times), ("sizes", sizes, Sizes)):
        if not isinstance(value, kind):
            raise TypeError(f"optimise: {label} is a {kind.__name__}, not {shown(value)}")
    if times.overlap:
        raise ScheduleError(
            f"optimise: overlap={times.overlap:g}: it makes orders of passes that run one after the other; leave it out"
        )
    ranks, batches, chunks = counts("optimise", ranks=ranks, batches=batches, chunks=chunks)
    tries, seed = whole(tries, "optimise: tries"), whole(seed, "optimise: seed")
    if tries < 0:
        raise ScheduleError(f"optimise: tries={tries}; the number of rules to try must be at least 0")
    if objective not in OBJECTIVES:
        raise ScheduleError(f"optimise: objective is {' or '.join(map(repr, OBJECTIVES))}, not {shown(objective)}")
    limits = _limits(limit, ranks)
    if limits is not None:
        _check_weights(sizes, ranks * chunks)
    placements = dict.fromkeys([*([vee(ranks, chunks)] if chunks == 2 else []), loop(ranks, chunks)])
    costs_of = {rank_of: costs(times, rank_of, sizes, limits, objective) for rank_of in placements}
    too_much = {rank_of: text for rank_of, cost in costs_of.items() if (text := _text_of_too_much(cost))}
    if len(too_much) == len(costs_of):
        raise ScheduleError(next(iter(too_much.values())))
    costs_of = {rank_of: cost for rank_of, cost in costs_of.items() if rank_of not in too_much}
    fixed = [
        simulate(build(name, ranks, batches, chunks), times, sizes)
        for name, policy in POLICIES.items() if policy.chunks is None or chunks in policy.chunks
    ]  # fmt: skip
    fitting = [run for run in fixed if _within(run.peak, limits)]
    shortest = min(fitting, key=lambda run: _length(run, objective), default=None)
    runs = list(fitting)
    for rank_of, cost in costs_of.items():
        starts = [
            *(orders_of(run.schedule) for run in fitting if run.schedule.rank_of == rank_of),
            one_by_one(cost, batches),
        ]
        enough = lower_bound(times, rank_of, batches, sizes, limits, objective)
        if any(_length(run, objective) <= enough * (1 + EPSILON) for run in runs):
            continue
        if (schedule := _best(cost, batches, starts, enough, tries // chunks, seed)) is not None:
            runs.append(simulate(schedule, times, sizes))
    if not runs:
        raise ScheduleError(_text_of_nothing_found(fixed, costs_of, batches, sizes, limits))
    best = _best_of(runs, objective)
    # A sum of floats may be below the bound by its last digits.
    bound = min(_length(best, objective), lower_bound(times, best.schedule.rank_of, batches, sizes, limits, objective))
    best_fixed = None if shortest is None else (shortest.schedule.name, _length(shortest, objective))
    return Optimised(best, best_fixed, bound, None if limits is None else tuple(limits), objective)


def _length(run: Simulation, objective: Objective) -> float:
    return run.span if objective == "span" else run.makespan


def _best_of(runs: Sequence[Simulation], objective: Objective) -> Simulation:
    """Return the shortest run by the objective.

    Among equals it is the shortest by the other objective, then the one that needs the least memory.
    """
    other: Objective = "makespan" if objective == "span" else "span"
    least = min(_length(run, objective) for run in runs)
    equal = [run for run in runs if _length(run, objective) <= least * (1 + EPSILON)]
    best = min(reversed(equal), key=lambda run: (round(_length(run, other) / (least or 1.0), 9), max(run.peak)))
    return replace(best, schedule=replace(best.schedule, name=NAME))


def _best(
    cost: Costs, batches: int, starts: Sequence[Orders], enough: float, tries: int, seed: int
) -> PipelineSchedule | None:
    paper, peaks = Paper(cost, batches), Peaks(cost, batches)
    result = search(paper, peaks, starts, enough, tries, seed)
    if not result.orders:
        return None
    orders = result.orders[-1][1]
    whole = with_joined_backwards(orders, paper)
    return schedule_of(whole if peaks.within(whole) else orders, cost.rank_of, batches, NAME)


def _limits(limit: float | Iterable[float] | None, ranks: int) -> list[float] | None:
    if limit is None:
        return None
    if isinstance(limit, Iterable) and not isinstance(limit, (str, bytes)) and getattr(limit, "ndim", 1) != 0:
        numbers: list[Any] = list(limit)
        if len(numbers) != ranks:
            raise ScheduleError(f"limit has {len(numbers)} numbers, but there are {ranks} ranks")
    else:
        numbers = [limit] * ranks
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, Real):
            raise TypeError(
                f"optimise: limit must be a number, one number for each rank, or None for no limit, not {shown(limit)}"
            )
        if not float(number) >= 0:
            raise ScheduleError(f"limit is {float(number)}; it must be a number from 0, or None for no limit")
    return [float(number) for number in numbers]


def _check_weights(sizes: Sizes, stages: int) -> None:
    """Refuse backwards that end with more memory than they begin with: the search places them without looking."""
    for stage, (activation, for_weights) in enumerate(zip(*kept(sizes, stages), strict=True)):
        if for_weights > activation:
            raise ScheduleError(
                f"for_weights is {for_weights:g} on stage {stage}, and activation {activation:g}: optimise keeps "
                f"within a limit only where for_weights is at most activation; give the larger one for both"
            )


def _within(peak: Sequence[float], limits: Sequence[float] | None) -> bool:
    return limits is None or all(used <= limit * (1 + EPSILON) for used, limit in zip(peak, limits, strict=True))


def _text_of_too_much(cost: Costs) -> str:
    """Return why no schedule is within the limit, if one micro-batch is not; else an empty text.

    When its last forward on a rank begins, a micro-batch keeps an activation for each stage of the rank.
    """
    for rank, rank_stages in enumerate(cost.stages_of):
        activations, buffers, fixed = (
            sum(cost.activation[stage] for stage in rank_stages),
            cost.buffers(rank_stages[-1]),
            cost.fixed[rank],
        )
        if not _within([activations + buffers + fixed], [cost.limit[rank]]):
            parts = [
                f"{activations:.6g} of activations",
                *([f"{buffers:.6g} of messages"] if buffers else []),
                *([f"{fixed:.6g} fixed"] if fixed else []),
            ]
            return (
                f"no schedule keeps within limit={cost.limit[rank]:.6g} on rank {rank}: one micro-batch alone needs "
                f"{activations + buffers + fixed:.6g} there ({', '.join(parts)}); raise the limit to that, or make "
                f"micro-batches or stages smaller"
            )
    return ""


def _text_of_nothing_found(
    fixed: Sequence[Simulation],
    costs_of: dict[tuple[int, ...], Costs],
    batches: int,
    sizes: Sizes,
    limits: Sequence[float] | None,
) -> str:
    """Return the text of the error, with the schedule nearest to the limit.

    That is a policy's schedule, or one micro-batch after the other.
    """
    assert limits is not None
    peaks = [(run.schedule.name, run.peak) for run in fixed]
    for rank_of, cost in costs_of.items():
        peaks.append((NAME, memory(schedule_of(one_by_one(cost, batches), rank_of, batches, NAME), sizes).peak))
    name, peak = min(peaks, key=lambda named: max(used - limit for used, limit in zip(named[1], limits, strict=True)))
    needs = f"{max(peak):.6g}" if len(set(limits)) == 1 else _numbers(peak)
    limit = _numbers(limits[:1] if len(set(limits)) == 1 else limits)
    return (
        f"nothing was found within limit={limit}; the smallest schedule found needs {needs}, {name}: raise the "
        f"limit to that"
    )


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.6g}" for value in values)
