"""Compute lower bounds on the length of a schedule, for given times, placement and memory limits.

The same bounds hold for both objectives. For the makespan one clock starts with the first task of all. For the longest
span of a rank each rank has its own clock, which starts with the first task of that rank (see ``ShortestTimes``).

All bounds hold for every schedule, whether its backwards are split or not. To see that an unsplit backward is never
better, replace it by its two halves, one after the other: nothing ends later, and no more memory is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import floor, inf
from typing import Literal, get_args

from autopar.pipeline.per_stage import Sizes, Times, durations, kept, per_pair, per_stage
from autopar.pipeline.shape import stages_of

Objective = Literal["makespan", "span"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

EPSILON = 1e-9  # of a limit: sums of floats are not exact


@dataclass(frozen=True)
class Costs:
    """Times and sizes as numbers, one for each stage.

    Attributes:
        forward, backward, weight: F, B, W.
        transfer: from a stage to the next, and the same back; 0 where both are on one rank.
        activation, later: the memory that a micro-batch keeps until the end of its B, and then until the end of its W.
        boundary: the buffer of a message between a stage and the next; 0 where both are on one rank.
        fixed, limit: the memory that each rank always uses, and the most that it may use (``inf``: no limit).
        rank_of, stages_of: the placement.
        objective: the length to bound: the makespan, or the longest span of a rank from its first begin to its last
            end.
    """

    forward: list[float]
    backward: list[float]
    weight: list[float]
    transfer: list[float]
    activation: list[float]
    later: list[float]
    boundary: list[float]
    fixed: list[float]
    limit: list[float]
    rank_of: tuple[int, ...]
    stages_of: tuple[tuple[int, ...], ...]
    objective: Objective = "makespan"

    @property
    def room(self) -> list[float]:
        """The memory that each rank has for activations and buffers."""
        return [
            (limit - fixed) + EPSILON * limit if limit < inf else inf
            for limit, fixed in zip(self.limit, self.fixed, strict=True)
        ]

    def buffers(self, stage: int) -> float:
        """Return the memory of the buffers in use while a stage runs its forward: of its receive and its send."""
        return (self.boundary[stage - 1] if stage else 0.0) + (
            self.boundary[stage] if stage + 1 < len(self.rank_of) else 0.0
        )


def costs(times: Times, rank_of: Sequence[int], sizes: Sizes | None = None, limit: Sequence[float] | None = None,
          objective: Objective = "makespan") -> Costs:  # fmt: skip
    """Return times and sizes for a placement, and a limit for each rank (``None``: no limit).

    Raises:
        ScheduleError: there are not as many numbers as stages.
    """
    sizes, stages, ranks = sizes or Sizes(), len(rank_of), max(rank_of) + 1
    apart = [rank_of[stage] != rank_of[stage + 1] for stage in range(stages - 1)]
    transfer, boundary = (
        [number if are_apart else 0.0 for number, are_apart in zip(per_pair(value, stages, label), apart, strict=True)]
        for value, label in ((times.transfer, "transfer"), (sizes.boundary, "boundary"))
    )
    fixed = per_stage(sizes.fixed, stages, "fixed")
    return Costs(
        *durations(times, stages),
        transfer,
        *kept(sizes, stages),
        boundary,
        [sum(fixed[stage] for stage in own) for own in stages_of(rank_of)],
        [inf] * ranks if limit is None else [float(most_memory) for most_memory in limit],
        tuple(rank_of),
        stages_of(rank_of),
        objective,
    )  # fmt: skip


@dataclass(frozen=True)
class ShortestTimes:
    """The shortest times before, after and around a stage.

    Attributes:
        head: from the begin of the step to the begin of the stage's first forward: through all stages before it. For
            the span: from the begin of the stage's rank.
        turn: from the end of a micro-batch's forward to the begin of its backward: through all stages after it and
            back.
        tail: from the end of a micro-batch's backward to the end of the step: back to some stage before it, and the
            weight gradient there. For the span: the rank of that earlier stage ends so much later. It also began
            earlier, by the forwards from it to this stage, and these are counted here. So its span contains ``head``,
            the time in between and ``tail``.
        trip: from the begin of a micro-batch's forward to the end of its backward.
    """

    head: list[float]
    turn: list[float]
    tail: list[float]
    trip: list[float]


def shortest_times(cost: Costs) -> ShortestTimes:
    stages = len(cost.rank_of)
    head = list(accumulate((f + c for f, c in zip(cost.forward, cost.transfer, strict=False)), initial=0.0))
    turn, tail = [0.0] * stages, [cost.weight[0]]
    for stage in range(stages - 2, -1, -1):
        turn[stage] = turn[stage + 1] + cost.forward[stage + 1] + cost.backward[stage + 1] + 2 * cost.transfer[stage]
    spans = cost.objective == "span"
    for stage in range(1, stages):
        earlier = cost.forward[stage - 1] + cost.transfer[stage - 1] if spans else 0.0
        tail.append(max(cost.weight[stage], cost.transfer[stage - 1] + cost.backward[stage - 1] + tail[-1] + earlier))
    if spans:  # a rank begins with its first stage, and so do the clock and what comes before it
        head = [head[stage] - head[cost.stages_of[rank][0]] for stage, rank in enumerate(cost.rank_of)]
        tail = [max(cost.weight[stage], tail[stage] - head[stage]) for stage in range(stages)]
    trip = [f + t + b for f, t, b in zip(cost.forward, turn, cost.backward, strict=True)]
    return ShortestTimes(head, turn, tail, trip)


def work(cost: Costs, batches: int) -> float:
    """Bound by the busiest rank: its head, all its work, and the tail that remains after its last backward.

    The last backward of a rank is of its first stage s. Let it end at e. Of the rank's work only weight gradients come
    after e, together x; so e >= head + work - x, and the step ends at e + tail(s) or later, and at e + x or later: no
    earlier than head + work + max(0, tail(s) - x). See ``left_over`` for the most that x can be.
    """
    shortest = shortest_times(cost)
    return max(
        shortest.head[stages[0]] + load(cost, stages, batches) + _after(cost, shortest, rank, batches)
        for rank, stages in enumerate(cost.stages_of)
    )


def _after(cost: Costs, shortest: ShortestTimes, rank: int, batches: int) -> float:
    """Return max(0, tail - x): how long the step goes on after all work of a rank that begins before that."""
    return max(0.0, shortest.tail[cost.stages_of[rank][0]] - left_over(cost, rank, batches))


def first_backward(cost: Costs, batches: int) -> float:
    """Bound by the first backward: until then a rank runs only forwards, as many as its memory holds.

    That backward is of the rank's last stage s, and begins at b >= head(s) + F(s) + turn(s). Before b the rank has
    computed forwards alone, and none of them has freed its activation. Let y be the most work of such forwards
    (``ahead``). Then work - y is left after b, and the end follows as in ``work``.
    """
    shortest = shortest_times(cost)
    bounds = []
    for rank, stages in enumerate(cost.stages_of):
        stage = stages[-1]
        begin = shortest.head[stage] + cost.forward[stage] + shortest.turn[stage]
        work_left = load(cost, stages, batches) - ahead(cost, rank, batches)
        bounds.append(begin + work_left + _after(cost, shortest, rank, batches))
    return max(bounds)


def round_trips(cost: Costs, batches: int) -> float:
    """Bound by round trips: a stage that holds k micro-batches begins a forward when the k-th before it is freed.

    Let f(n) be the begin of the n-th forward of stage s in the order of time. At that time the stage holds at most k -
    1 other micro-batches, so n - k are freed. Each of them was held for at least L = F + turn + B, so the (n-k)-th of
    them was freed at f(n-k) + L or later. So f(n) >= f(n-k) + L, also f(n) >= f(n-1) + F, and f(1) >= head. The
    micro-batch of the m-th forward takes L and then the tail. While a stage keeps an activation up to B, all earlier
    stages of its rank keep theirs, so k counts them too. The same holds with L + W, where only what the other
    micro-batches keep all the time up to the end of W counts. With one micro-batch, or memory for one, this is the
    critical path.
    """
    shortest, room = shortest_times(cost), cost.room
    best = 0.0
    for rank, stages in enumerate(cost.stages_of):
        for number, stage in enumerate(stages):
            forward, trip = cost.forward[stage], shortest.trip[stage]
            free = room[rank] - cost.buffers(stage)
            activations = sum(cost.activation[earlier] for earlier in stages[: number + 1])
            to_the_end = min(cost.activation[stage], cost.later[stage])
            for size, extra in ((activations, 0.0), (to_the_end, cost.weight[stage])):
                k = batches if free == inf or not size else max(1, 1 + floor((free - activations) / size))
                rounds, remaining = divmod(batches - 1, k)
                best = max(
                    best,
                    shortest.head[stage]
                    + rounds * max(trip + extra, k * forward)
                    + remaining * forward
                    + trip
                    + shortest.tail[stage],
                )
    return best


def area(cost: Costs, batches: int) -> float:
    """Bound by memory times time: Little's law.

    A micro-batch keeps its activation for F + turn + B at least, and the part for the weight gradient for W more. The
    sum of size times time, over the stages of a rank and all micro-batches, is at most the memory of the rank times the
    time from its head to the end.
    """
    shortest, room = shortest_times(cost), cost.room
    best = 0.0
    for rank, stages in enumerate(cost.stages_of):
        if 0 < room[rank] < inf:
            memory_time = sum(cost.activation[s] * shortest.trip[s] + cost.later[s] * cost.weight[s] for s in stages)
            best = max(best, shortest.head[stages[0]] + batches * memory_time / room[rank])
    return best


def load(cost: Costs, stages: Sequence[int], batches: int) -> float:
    """Return the time that a rank computes in all."""
    return batches * sum(cost.forward[stage] + cost.backward[stage] + cost.weight[stage] for stage in stages)


def ahead(cost: Costs, rank: int, batches: int) -> float:
    """Return the most work of forwards that fits into a rank's memory before any of their activations is freed."""
    stages, room = cost.stages_of[rank], cost.room[rank]
    if len(stages) == 1:
        (stage,) = stages
        return cost.forward[stage] * most(batches, cost.activation[stage], room - cost.buffers(stage))
    everything = batches * sum(cost.forward[stage] for stage in stages)
    if room == inf or any(not cost.activation[stage] and cost.forward[stage] for stage in stages):
        return everything
    return min(
        everything,
        max(0.0, room) * max((cost.forward[s] / cost.activation[s] for s in stages if cost.activation[s]), default=0.0),
    )


def left_over(cost: Costs, rank: int, batches: int) -> float:
    """Return the most work of weight gradients that a rank's memory allows after its last backward.

    The last backward keeps all of its activation.
    """
    stages, room = cost.stages_of[rank], cost.room[rank]
    stage = stages[0]
    free = room - cost.activation[stage]
    if len(stages) == 1:
        return cost.weight[stage] * (1 + most(batches - 1, cost.later[stage], free))
    everything = batches * sum(cost.weight[s] for s in stages)
    if room == inf or any(not cost.later[s] and cost.weight[s] for s in stages):
        return everything
    best = max((cost.weight[s] / cost.later[s] for s in stages if cost.later[s]), default=0.0)
    return min(everything, cost.weight[stage] + max(0.0, free) * best)


def most(batches: int, each: float, room: float) -> int:
    """Return the number of micro-batches that fit into the room, if each takes the given size; at most all."""
    return batches if room == inf or each * batches <= room else max(0, floor(room / each)) if each else batches


BOUNDS: Mapping[str, Callable[[Costs, int], float]] = {
    "work": work,
    "first backward": first_backward,
    "round trips": round_trips,
    "area": area,
}


def lower_bound(times: Times, rank_of: Sequence[int], batches: int, sizes: Sizes | None = None,
                limit: Sequence[float] | None = None, objective: Objective = "makespan") -> float:  # fmt: skip
    """Return the largest lower bound: no schedule with this placement within this limit is shorter.

    It holds up to rounding, and takes time linear in stages.

    Args:
        rank_of: the rank of each stage.
        limit: the most memory of each rank, in the unit of ``sizes``; ``None``: no limit.
        objective: the length to bound: the makespan, or the longest span of a rank.
    """
    cost = costs(times, rank_of, sizes, limit, objective)
    return max(bound(cost, batches) for bound in BOUNDS.values())
