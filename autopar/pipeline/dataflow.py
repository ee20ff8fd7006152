"""What each pass reads: the dependencies that every schedule keeps.

The forward of a stage reads that of the stage before; the last backward reads its own forward, every other that of the stage
after; a weight gradient reads the backward of its stage. What lies on another rank comes in a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.pipeline.task import Task


def reads(task: Task, stages: int) -> Iterator[Task]:
    """The computations whose results a computation reads."""
    kind, stage, batch, _ = task
    if kind == "FW":
        if stage:
            yield Task("FW", stage - 1, batch)
    elif kind == "BW":
        yield Task("FW", stage, batch)
        if stage + 1 < stages:
            yield Task("BW", stage + 1, batch)
    else:
        yield Task("BW", stage, batch)


def source(task: Task, rank_of: Sequence[int]) -> Task | None:
    """The receive of what a computation reads from another rank."""
    kind, stage, batch, _ = task
    if kind == "FW":
        peer = stage - 1
    elif kind == "BW":
        peer = stage + 1
    else:
        return None
    if 0 <= peer < len(rank_of) and rank_of[peer] != rank_of[stage]:
        return Task("FR" if kind == "FW" else "BR", stage, batch, peer)
    return None


def target(task: Task, rank_of: Sequence[int]) -> Task | None:
    """The send of a computation's result to another rank."""
    kind, stage, batch, _ = task
    if kind == "FW":
        peer = stage + 1
    elif kind == "BW":
        peer = stage - 1
    else:
        return None
    if 0 <= peer < len(rank_of) and rank_of[peer] != rank_of[stage]:
        return Task("FS" if kind == "FW" else "BS", stage, batch, peer)
    return None


def reader(message: Task) -> Task:
    """The computation that reads what a message brings, on the receiving stage."""
    return Task(message.kind[0] + "W", message.stage if message.kind[1] == "R" else message.peer, message.batch)


def made_by(send: Task) -> Task:
    """The computation whose result a send takes away."""
    return Task(send.kind[0] + "W", send.stage, send.batch)
