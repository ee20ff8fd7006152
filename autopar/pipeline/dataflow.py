"""Define what each pass reads: the dependencies that every schedule keeps.

The forward of a stage reads that of the stage before. The last backward reads its own forward, every other one that of
the stage after. A weight gradient reads the backward of its stage. Results from another rank come in a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.pipeline.task import Task

BEFORE = {"FW": -1, "BW": 1, "WW": 0}  # computation → the distance to the stage whose result it reads


def reads(task: Task, stages: int) -> Iterator[Task]:
    """Yield the computations whose results a computation reads."""
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
    """Return the receive of a computation's input from another rank, or ``None``."""
    kind, stage, batch, _ = task
    peer = stage + BEFORE[kind]
    if 0 <= peer < len(rank_of) and rank_of[peer] != rank_of[stage]:
        return Task(kind[0] + "R", stage, batch, peer)
    return None


def reader(message: Task) -> Task:
    """Return the computation that reads a message, on the receiving stage."""
    return Task(message.kind[0] + "W", message.stage if message.kind[1] == "R" else message.peer, message.batch)


def made_by(send: Task) -> Task:
    """Return the computation whose result a send transfers."""
    return Task(send.kind[0] + "W", send.stage, send.batch)
