"""Raise an error that one rank has with a folder of weights on all ranks, so that none of them waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed

from autopar.runtime.processes.job import Job


@contextmanager
def on_all_ranks(job: Job | None, verb: str) -> Iterator[None]:
    """Raise an error of one rank on all ranks: the others must not wait for a rank that lacks a file."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        if job is None:
            raise
        failure = error
    if job is None:
        return
    failures: list[str | None] = [None] * job.control.size()
    distributed.all_gather_object(failures, failure and f"{type(failure).__name__}: {failure}", job.control)
    if failure is not None:
        raise failure
    if failed := {rank: text for rank, text in enumerate(failures) if text is not None}:
        rank, text = next(iter(failed.items()))
        raise RuntimeError(f"rank {rank} cannot {verb}: {text}")
