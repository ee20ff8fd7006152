"""Word the last message of a rank that has lost the store of the job: it cannot ask the others any more."""

from __future__ import annotations

from autopar.runtime.current_op import CurrentOp
from autopar.runtime.processes.watch.beat import Beat
from autopar.runtime.processes.watch.holder import Holder
from autopar.runtime.processes.watch.host_names import HostNames
from autopar.runtime.processes.watch.verdict import LOST_HOST
from autopar.runtime.processes.watch.wording import at, last_seen

ENDED = "ended"

UNANSWERED = "has given no answer"  # it is followed by the seconds


def lost_store(
    how: str, rank: int, place: CurrentOp, *, holder: Holder, names: HostNames, first: Beat | None, several: bool
) -> str:
    """Return the message.

    Args:
        how: how the owner of the store ended.
        rank: this rank, and ``place`` where it is.
        first: the newest beat of rank 0.
        several: whether the job has several hosts.
    """
    text, remedy = "the launcher of this job was lost, and the job's store with it", ""
    if holder.is_rank_0:
        text = f"{names.named(0)}, which holds the store of the job, {how}"
        text += "" if first is None or how == ENDED else f"; {last_seen(first)}"
    elif several:
        own, theirs = (names.with_ranks(names.of(one)) for one in (rank, 0))
        text = f"the launcher of {theirs}, which holds the store of the job, {how}"
        remedy = LOST_HOST if holder.is_elsewhere else ""
        if how.startswith(UNANSWERED):
            text = f"{own} has lost {theirs}, which holds the store of the job and {how}"
    return f"autopar: {text}; {names.named(rank)} was {at(place)}{remedy}\n"
