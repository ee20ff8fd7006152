"""Ranks of a pipeline that fail on purpose, for the tests of the watch: plain sends and receives, each rank a stage.

A script that serves jobs (``failing_ranks``). A step is three micro-batches forward, then three backward.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from failing_ranks import joined_rank_of_a_job

from autopar.runtime import current_op
from autopar.runtime.current_slot import slot, waiting_for
from autopar.runtime.processes.watch.watch import INTERVAL, Watch

BATCHES = 3
OP = "mm_12 : f32[4 4] = mm(t, x)   model.py:41  self.down(x)   in module layers.1.mlp"
CULPRIT = 2  # what happens, happens here, in micro-batch 1 of the second step, forward


class LeftTheStep(Exception):
    """The culprit goes back to the user's code."""


class Stage:
    """One rank's part of the steps. ``case``: what happens on the culprit."""

    def __init__(self, case: str, rank: int, ranks: int) -> None:
        self.case, self.rank, self.ranks, self.steps = case, rank, ranks, 0
        scope: dict[str, Callable[..., None]] = {}
        exec(compile("def run(compute):\n  compute()\n", "<stage>", "exec"), scope)
        self.op = scope["run"]
        current_op.register(self.op.__code__, {2: OP})

    def step(self) -> None:
        for during, back in (("F", False), ("B", True)):
            for batch in range(BATCHES):
                with slot(f"{during}W0{batch} of stage {self.rank} (micro-batch {batch})"):
                    self.run(during, batch, self.rank + 1 if back else self.rank - 1,
                             self.rank - 1 if back else self.rank + 1)  # fmt: skip
        self.steps += 1

    def run(self, during: str, batch: int, source: int, target: int) -> None:
        x, tag = torch.ones(4), 2 * batch + (during == "B")
        here = self.rank == CULPRIT and self.steps == 1 and (during, batch) == ("F", 1)
        if 0 <= source < self.ranks:
            with waiting_for((source,), f"{during}R0{batch} from stage {source}"):
                wait(dist.irecv(x, source, tag=tag))
        if here and self.case == "exception beside the ops":
            raise ValueError("a bad value")
        if here and self.case in ("leaves the step", "ends"):
            raise LeftTheStep
        self.op((lambda: happen(self.case)) if here else (lambda: None))
        if 0 <= target < self.ranks and not (here and self.case == "never sends"):
            with waiting_for((target,), f"{during}S0{batch} to stage {target}"):
                wait(dist.isend(x, target, tag=tag))


def wait(work: Any) -> None:
    work.wait()


def happen(case: str) -> None:
    if case == "exception":
        raise ValueError("a bad value")
    if case in ("kill", "stop"):
        time.sleep(3 * INTERVAL)  # so that the others know where it was
        os.kill(os.getpid(), signal.SIGKILL if case == "kill" else signal.SIGSTOP)
    if case == "computes":
        time.sleep(100)


if __name__ == "__main__":
    job, rank, store = joined_rank_of_a_job()
    stage = Stage(job["case"], rank, job["ranks"])
    with Watch(store, rank, job["ranks"], timeout=job["timeout"]):
        for _ in range(4):
            try:
                stage.step()
            except LeftTheStep:
                if job["case"] == "ends":
                    break
                time.sleep(100)
