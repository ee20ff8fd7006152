"""Choose on paper how a model is cut into the stages of a pipeline, its schedule, and the number of micro-batches.

Each candidate is judged by the simulation of its schedule. A dynamic program gives a lower bound of the makespan for
each set of blocks that are not assigned yet, so cuts that cannot be faster than the best one are left out; what is
found is exact, unless so many cuts are left that looking at all takes too long. For one stage of the blocks ``i … j-1``
with m micro-batches the bound is

    F before i + one message + m (F + B + W of the stage),
    F before i + one message + m (F + B of the stage) + one message + B before i,

because its first forward waits for the forwards of the stages before it, and after its last backward they have theirs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rich.table import Column, Table

from autopar.errors import PlanError, ScheduleError
from autopar.notebook import printed
from autopar.pipeline.per_stage import Sizes, Times
from autopar.pipeline.policies import POLICIES, build
from autopar.pipeline.schedule import PipelineSchedule
from autopar.pipeline.simulate import Simulation

LOOKED_AT = 500  # the most cuts that are simulated, each in some milliseconds
NEAR = 1e-9  # relative: a bound that is nearer to the best makespan proves that nothing is faster


@dataclass(frozen=True)
class Block:
    """What a block of the model takes for one micro-batch on the ranks of one stage; seconds and bytes.

    Attributes:
        forward, backward, weight: the seconds of F, B and W: the forward, the gradient of the input, and those of the
            weights.
        transfer: the seconds of the message to the next block, if it is on another rank, and of its gradient back.
        activation: bytes from the forward to the backward.
        boundary: bytes of the message.
        fixed: bytes that it needs all the time.
    """

    forward: float
    backward: float
    weight: float
    transfer: float = 0.0
    activation: float = 0.0
    boundary: float = 0.0
    fixed: float = 0.0


@dataclass(frozen=True)
class Pipelined:
    """The pipeline with the least makespan. Prints as a table.

    Attributes:
        policy, microbatches, chunks: the schedule's name, the number of micro-batches, and that of stages on a rank.
        cut: the first block of each stage.
        blocks: the number of blocks.
        schedule, simulation: the schedule, and its simulation.
        bound: seconds that no pipeline of these policies and numbers of micro-batches is faster than.
        looked_at: the number of cuts that were simulated.
    """

    policy: str
    microbatches: int
    chunks: int
    cut: tuple[int, ...]
    blocks: int
    schedule: PipelineSchedule = field(repr=False)
    simulation: Simulation[PipelineSchedule] = field(repr=False)
    bound: float
    looked_at: int

    @property
    def seconds(self) -> float:
        """The makespan."""
        return self.simulation.makespan

    @property
    def exact(self) -> bool:
        """Whether no cut, policy or number of micro-batches is faster."""
        return self.bound >= self.seconds * (1 - NEAR)

    def __str__(self) -> str:
        table = Table("stage", "rank", "blocks", Column("memory of the rank", justify="right"))
        for stage, (first, end) in enumerate(itertools.pairwise((*self.cut, self.blocks))):
            rank, last = self.schedule.rank_of[stage], end - 1
            name = f"{first}" if first == last else f"{first}–{last}"
            table.add_row(str(stage), str(rank), name, f"{self.simulation.peak[rank]:,.0f}")
        proof = "no other is faster" if self.exact else f"none is more than {1 - self.bound / self.seconds:.2%} faster"
        return (
            f"{printed(table, width=100)}{self.policy} with {self.microbatches} micro-batches: "
            f"{self.seconds * 1e3:,.3f} ms, bubble {self.simulation.bubble_rate:.1%}, and {proof}\n"
        )


def best_pipeline(
    blocks: Mapping[int, Sequence[Block]], ranks: int, *, policies: Collection[str] = tuple(POLICIES),
    limit: float = math.inf, rendezvous: bool = False, most: int = LOOKED_AT,
) -> Pipelined:  # fmt: skip
    """Return the pipeline with the least makespan: cuts × policies × numbers of micro-batches.

    Args:
        blocks: number of micro-batches → the blocks of the model in their order, each for one of so many micro-batches.
            Equal layers are one block that is listed as often: a price is affine in the depth.
        ranks: the ranks of the pipeline.
        policies: the schedules to choose from, by the names of ``autopar.pipeline``.
        limit: the most bytes of a rank.
        rendezvous: whether a message waits for both its ranks, as of ``Times``: on a CPU.
        most: after so many simulated cuts the best one so far is taken, and the bound is that of what is left.

    Raises:
        PlanError: there are fewer blocks than stages in each schedule, or nothing fits into the limit.
    """
    candidates: list[_Candidate] = []
    why = f"there is nothing to choose from: {len(blocks)} numbers of micro-batches, {len(policies)} policies"
    for (count, row), policy in itertools.product(blocks.items(), policies):
        try:
            schedule = build(policy, ranks, count)
        except ScheduleError as error:
            why = str(error)
            continue
        if len(row) < schedule.stages:
            why = f"{policy} has {schedule.stages} stages on {ranks} ranks, and the model has {len(row)} blocks to cut"
            continue
        candidates.append(_Candidate(policy, schedule, tuple(row), count, rendezvous))
    if not candidates:
        raise PlanError(f"no pipeline can be made: {why}")
    candidates.sort(key=lambda candidate: candidate.bound)
    best: tuple[_Candidate, tuple[int, ...], Simulation[PipelineSchedule]] | None = None
    incumbent, looked_at, left, least = [math.inf], 0, math.inf, math.inf
    rest = [(candidate, candidate.cuts(incumbent)) for candidate in candidates]
    first = [(candidate, itertools.islice(cuts, 1)) for candidate, cuts in rest]  # the most promising cut of each
    for candidate, cuts in (*first, *rest):
        for cut, bound in cuts:
            if looked_at >= most:
                left = min(left, candidate.bound)
                break
            looked_at += 1
            simulation = candidate.simulate(cut)
            assert simulation.makespan >= bound * (1 - NEAR), "the bound holds"
            least = min(least, max(simulation.peak))
            if simulation.makespan < incumbent[0] and max(simulation.peak) <= limit:
                best, incumbent[0] = (candidate, cut, simulation), simulation.makespan
    if best is None:
        raise PlanError(
            f"no pipeline was found that fits into {limit:,.0f} bytes a rank: the one that needs least takes "
            f"{least:,.0f}; use more ranks, more micro-batches, or a larger limit"
        )
    found, cut, simulation = best
    schedule = found.schedule
    return Pipelined(
        found.policy, found.count, schedule.chunks, cut, len(found.blocks), schedule, simulation,
        min(simulation.makespan, left), looked_at,
    )  # fmt: skip


@dataclass
class _Candidate:
    """A schedule for so many micro-batches, whose cut is open."""

    policy: str
    schedule: PipelineSchedule
    blocks: tuple[Block, ...]
    count: int
    rendezvous: bool

    def __post_init__(self) -> None:
        self._split = self.schedule.is_split
        self._stages = self.schedule.stages
        self._forward = self._sums([block.forward for block in self.blocks])
        self._back = self._sums([block.backward + (0.0 if self._split else block.weight) for block in self.blocks])
        self._all = self._sums([block.forward + block.backward + block.weight for block in self.blocks])

    @staticmethod
    def _sums(values: Sequence[float]) -> list[float]:
        return list(itertools.accumulate(values, initial=0.0))

    @property
    def bound(self) -> float:
        """No cut has a lower makespan: the busiest rank has its share of the work."""
        return max(self._rest[0][0], self.count * self._all[-1] / self.schedule.ranks)

    def _around(self, stage: int, first: int) -> tuple[float, float]:
        """Return the least time before the first forward of a stage, and after its last backward."""
        rank_of = self.schedule.rank_of
        message = self.blocks[first - 1].transfer if stage and rank_of[stage] != rank_of[stage - 1] else 0.0
        return self._forward[first] + message, self._back[first] + message

    def _least(self, stage: int, first: int, end: int) -> float:
        """Return a bound of the makespan, if a stage has these blocks."""
        before, after = self._around(stage, first)
        work = self.count * (self._all[end] - self._all[first])
        chain = self.count * (self._forward[end] - self._forward[first] + self._back[end] - self._back[first])
        return before + max(work, chain + after)

    @cached_property
    def _rest(self) -> list[list[float]]:
        """A bound of the makespan for each stage and block from which on stages are open: ``[stage][first]``."""
        total = len(self.blocks)
        rest = [[math.inf] * (total + 1) for _ in range(self._stages + 1)]
        rest[self._stages][total] = 0.0
        for stage in reversed(range(self._stages)):
            for first in range(total):
                for end in range(first + 1, total + 1):
                    if rest[stage + 1][end] < math.inf:
                        rest[stage][first] = min(
                            rest[stage][first], max(self._least(stage, first, end), rest[stage + 1][end])
                        )
        return rest

    def cuts(self, incumbent: Sequence[float]) -> Iterator[tuple[tuple[int, ...], float]]:
        """Yield cuts whose bound is below ``incumbent[0]``, which may fall meanwhile, and their bounds."""
        rank_of, total = self.schedule.rank_of, len(self.blocks)

        def extended(
            cut: tuple[int, ...], first: int, bound: float, ranks: Mapping[int, tuple[float, float]]
        ) -> Iterator[tuple[tuple[int, ...], float]]:
            """Continue a cut. ``ranks``: rank → the time around its work, and the work of its stages so far."""
            stage = len(cut)
            if stage == self._stages:
                yield cut, bound
                return
            rank, options = rank_of[stage], []
            around, busy = ranks.get(rank, (sum(self._around(stage, first)), 0.0))
            for end in range(first + 1, total + 1):
                chain = self._forward[end] - self._forward[first] + self._back[end] - self._back[first]
                work = busy + self.count * chain
                now = max(bound, self._least(stage, first, end), around + work)
                options.append((max(now, self._rest[stage + 1][end]), now, end, work))
            for least, now, end, work in sorted(options):
                if least >= incumbent[0] * (1 - NEAR):
                    return
                yield from extended((*cut, first), end, now, {**ranks, rank: (around, work)})

        yield from extended((), 0, 0.0, {})

    def simulate(self, cut: tuple[int, ...]) -> Simulation[PipelineSchedule]:
        """Simulate the schedule with the stages of a cut."""
        stages = [self.blocks[first:end] for first, end in itertools.pairwise((*cut, len(self.blocks)))]

        def sums(name: str) -> list[float]:
            return [math.fsum(getattr(block, name) for block in stage) for stage in stages]

        def ends(name: str) -> list[float]:
            return [getattr(stage[-1], name) for stage in stages[:-1]]

        times = Times(sums("forward"), sums("backward"), sums("weight"), ends("transfer"), rendezvous=self.rendezvous)
        sizes = Sizes(sums("activation"), None, ends("boundary"), sums("fixed"))
        return self.schedule.simulate(times, sizes)
