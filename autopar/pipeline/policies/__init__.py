"""Make schedules by policies, which are rules with names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from autopar.errors import ScheduleError, shown
from autopar.gc_pause import gc_paused
from autopar.pipeline.policies.phases import order
from autopar.pipeline.policies.table import POLICIES, Policy, loop, vee
from autopar.pipeline.rows import rows
from autopar.pipeline.schedule import PipelineSchedule
from autopar.pipeline.shape import counts, placement, stages_of
from autopar.pipeline.task import Table

__all__ = ["POLICIES", "Policy", "build", "loop", "named", "vee"]


@gc_paused()
def build(policy: str, ranks: int, batches: int, chunks: int | None = None, *, rank_of: Sequence[int] | None = None,
          messages: bool = True, recompute: bool = False) -> PipelineSchedule:  # fmt: skip
    """Return the schedule of a policy.

    Args:
        policy: a name in ``POLICIES``, or the name in torch.distributed.pipelining; upper and lower case are equal.
        ranks, batches: p and m; any numbers from 1.
        chunks: the number of stages on a rank, if the policy leaves it open.
        rank_of: the rank of each stage, to number ranks differently from the policy. The policy decides which stages
            share a rank.
        messages: whether to add sends and receives, or only computations.
        recompute: whether a backward runs its forward again.

    Raises:
        ScheduleError: there is no such policy, or it has no schedule of these sizes.
    """
    name = named(policy)
    row = POLICIES[name]
    ranks, batches, chunks = counts(
        name, ranks=ranks, batches=batches, chunks=row.default if chunks is None else chunks
    )
    if row.chunks is not None and chunks not in row.chunks:
        raise ScheduleError(
            f"{name} has {' or '.join(map(str, row.chunks))} stages on a rank, not {chunks}; interleaved-1f1b and "
            f"looped-bfs have any number"
        )
    placed = row.placement(ranks, chunks)
    if row.table is not None:
        table = row.table(ranks, batches)
    else:
        assert row.phases is not None
        n = row.made_for(ranks, batches)
        orders = [
            order(row.phases(ranks, rank, n, chunks), stages, batches, row.split)
            for rank, stages in enumerate(stages_of(placed))
        ]
        table = rows(orders, placed)
    if rank_of is not None:
        table, placed = _renumbered(name, table, placed, placement(rank_of))
    schedule = PipelineSchedule(table, batches, placed, name, recompute).known_right()
    return schedule.with_messages(latest=row.latest) if messages else schedule


def _renumbered(
    name: str, table: Table, placed: Sequence[int], wanted: tuple[int, ...]
) -> tuple[Table, tuple[int, ...]]:
    """Return the table with its ranks in another order, such that each stage is on the wanted rank."""
    old = dict(zip(wanted, placed, strict=False))
    if (
        len(wanted) != len(placed)
        or sorted(old) != list(range(len(set(placed))))
        or [old[rank] for rank in wanted] != list(placed)
    ):
        raise ScheduleError(
            f"{name} cannot have its stages on ranks {wanted}: they must be as in {tuple(placed)}, with the ranks "
            f"numbered in any order"
        )
    return tuple(tuple(row[old[rank]] for rank in range(len(row))) for row in table), wanted


def named(policy: str) -> str:
    """Return the name of the policy that a name or alias means."""
    if not isinstance(policy, str):
        raise TypeError(f"a policy is a name, such as '1f1b', not {shown(policy)}")
    wanted = policy.lower().replace("_", "-").removeprefix("schedule")
    for name, row in POLICIES.items():
        if wanted in (name, *row.aliases):
            return name
    if wanted.startswith("optimi"):
        raise ScheduleError(
            f"{shown(policy)} is no policy of its own: call optimise(times, ranks, batches), or autopar schedule "
            f"optimised"
        )
    near = difflib.get_close_matches(wanted, POLICIES, n=1)
    raise ScheduleError(
        f"there is no policy {shown(policy)}{f'; did you mean {near[0]!r}' if near else ''}; there are "
        f"{', '.join(POLICIES)}"
    )
