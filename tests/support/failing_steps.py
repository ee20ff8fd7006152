"""Ranks of a real pipelined step that fail on purpose. A script that serves jobs (``failing_ranks``).

A job says what happens, on which rank, and where: in the third step, in an op of a slot (``slot``), in a wait of which
the text is given (``wait``), or in the user's loop. A rank may be slow before a message (``slow``), so that others wait
for it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from failing_ranks import joined_rank_of_a_job
from forks import MAY_CAPTURE_BEFORE
from pipelined_steps import SPLIT, Layers, Shared
from torch import nn

import autopar
from autopar import Mesh
from autopar.runtime import current_op
from autopar.runtime.current_slot import current_slot
from autopar.runtime.lowering import communication, point_to_point, source
from autopar.runtime.lowering.point_to_point import exchange_between_stages
from autopar.runtime.processes import job as jobs
from autopar.runtime.processes.watch.watch import INTERVAL
from autopar.runtime.running.messages import Message, ProcessMessages
from autopar.torch_private import kernel_of

STEPS, AT = 4, 2  # what happens, happens in step ``AT``, counted from 0
MICROBATCHES, ROWS = 4, 2
LATE = 100.0  # seconds; the end of the job ends it
ops = torch.ops.aten
FAULTY = (ops.tanh.default, ops.tanh_backward.default, ops.mm.default, ops.addmm.default, ops.addmm_.default)


class LeftTheStep(Exception):
    """The culprit goes back to the user's code, which goes on."""


class Looked(Layers):
    """An embedding, and layers."""

    def __init__(self, layers: int = 4, dim: int = 8) -> None:
        super().__init__(layers, dim)
        self.embed = nn.Embedding(5, dim)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(self.embed(x), y)


class Logarithms(Layers):
    """The logarithm of what enters the third layer, which is negative where a row begins with a negative number."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        marked = x[:, :1]
        for layer in self.layers[:2]:
            x = layer(x)
        x = self.layers[3](self.layers[2](torch.log(x + marked)))
        return nn.functional.cross_entropy(self.head(x), y)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "layers": Layers,
    "shared": Shared,
    "looked": Looked,
    "logarithms": Logarithms,
}


def step_of(
    model: str, sizes: dict[str, int], schedule: Any, *, chunks: int = 1, timeout: float = 600.0, looks: bool = False
) -> Any:
    torch.manual_seed(0)
    plan: Any = SPLIT if "tp" in sizes else "ddp" if "dp" in sizes else {}
    parallel = autopar.parallelize(MODELS[model](4 * chunks), Mesh(sizes), plan, timeout=timeout)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    return parallel.train_step(optimizer, microbatches=MICROBATCHES, schedule=schedule, detect_anomaly=looks)


def batch_of(model: str, k: int = 0, rows: int = ROWS) -> dict[str, torch.Tensor]:
    """The batch of step ``k``."""
    torch.manual_seed(k)
    count = rows * MICROBATCHES
    x = torch.randint(0, 5, (count,)) if model == "looked" else torch.randn(count, 8)
    if model == "logarithms":
        x[:, 0] = 5.0
    return {"x": x, "y": torch.randint(0, 11, (count,))}


class Fault:
    """What happens on a rank, in step ``AT``."""

    def __init__(self, job: dict[str, Any], rank: int) -> None:
        self.job, self.here, self.steps = job, rank == job.get("rank"), 0
        self.slow = rank == job.get("slow", {}).get("rank")

    @property
    def due(self) -> bool:
        return self.steps == AT

    def prepare(self) -> None:
        """Change this process, before programs are lowered."""
        if self.here and "slot" in self.job:
            mock.patch.object(source, "kernel_of", self.kernel).start()
        if self.here and "drops" in self.job:
            mock.patch.object(ProcessMessages, "start", self.started(ProcessMessages.start)).start()
        if self.here and "raises before" in self.job:
            mock.patch.object(ProcessMessages, "start", self.failing(ProcessMessages.start)).start()
        if self.slow:
            mock.patch.object(ProcessMessages, "start", self.late(ProcessMessages.start)).start()
            mock.patch.object(communication, "exchange_between_stages", self.late_exchange).start()

    def begin_step(self) -> None:
        """Do what happens before the step; in a wait, a thread does it once the rank waits."""
        if self.due and self.here and "wait" in self.job:
            threading.Thread(target=self.watch_for_the_wait, daemon=True).start()

    def watch_for_the_wait(self) -> None:
        while not (place := current_op.where()).peers or self.job["wait"] not in place.text:
            time.sleep(0.001)
        happen(self.job["what"])

    def kernel(self, op: Any) -> Any:
        kernel = kernel_of(op)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            if self.due and current_slot() == self.job["slot"]:
                happen(self.job["what"])
            return kernel(*args, **kwargs)

        return faulty if op in FAULTY else kernel

    def started(self, start: Callable[..., None]) -> Callable[..., None]:
        """``start`` of messages, which believes to have sent what the job says."""

        def drop(own: ProcessMessages, messages: list[Message]) -> None:
            dropped = [m for m in messages if self.due and m.words == self.job["drops"]]
            start(own, [message for message in messages if message not in dropped])
            for message in dropped:
                own._handles[message.task] = point_to_point.start([]), [message]

        return drop

    def failing(self, start: Callable[..., None]) -> Callable[..., None]:
        """``start`` of messages, which fails at what the job says."""

        def fail(own: ProcessMessages, messages: list[Message]) -> None:
            if self.due and any(message.words == self.job["raises before"] for message in messages):
                happen("raises")
            start(own, messages)

        return fail

    def late(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call that comes late, if its messages are those that the job says."""
        before = self.job["slow"]["before"]

        def wait_first(own: ProcessMessages, messages: list[Message]) -> None:
            if self.due and before in [message.words for message in messages]:
                time.sleep(LATE)
            call(own, messages)

        return wait_first

    def late_exchange(self, *args: Any) -> Any:
        """An exchange of a program of all stages, late in the slot that the job says."""
        if self.due and current_slot() == self.job["slow"]["before"]:
            time.sleep(LATE)
        return exchange_between_stages(*args)


def happen(what: str) -> None:
    if what == "raises":
        raise ValueError("a bad value")
    if what == "leaves":
        raise LeftTheStep
    if what == "computes":
        time.sleep(100)
    time.sleep(3 * INTERVAL)  # so that the others know where it was
    os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)


def train(job: dict[str, Any], rank: int) -> None:
    fault = Fault(job, rank)
    fault.prepare()
    model, loop = job.get("model", "layers"), job.get("loop", "") if fault.here else ""
    looks = "negative row" in job
    step = step_of(model, job["mesh"], job["schedule"], chunks=job.get("chunks", 1), looks=looks)
    for k in range(STEPS):
        fault.steps = k
        batch = batch_of(model, k)
        if k == AT and "bad id in row" in job:
            batch["x"][job["bad id in row"]] = 7
        if k == AT and "negative row" in job:
            batch["x"][job["negative row"], 0] = -5.0
        if k == 1:
            jobs._worlds[0].watch._timeout = job["timeout"]  # the first step may take longer
        if k == AT and loop == "ends":
            return
        if k == AT and loop == "raises":
            raise ValueError("a bad value")
        if k == AT and loop == "skips":
            continue
        fault.begin_step()
        try:
            step(batch)
        except LeftTheStep:
            if loop != "goes on":
                time.sleep(100)


def warm() -> None:
    """Capture such steps once, before ranks are forked."""
    for model, sizes, schedule, chunks in (
        ("layers", {"pp": 2, "tp": 2}, "1f1b", 1),
        ("layers", {"pp": 4}, "zb-v", 2),
        ("shared", {"pp": 4}, "1f1b", 1),
        ("looked", {"pp": 2, "dp": 2}, "1f1b", 1),
    ):
        step_of(model, sizes, schedule, chunks=chunks).simulate(**batch_of(model))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if MAY_CAPTURE_BEFORE:
        warm()
    job, rank, _ = joined_rank_of_a_job()
    train(job, rank)
