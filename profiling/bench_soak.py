"""Train a tiny Llama for 5,000 steps on four processes: memory, threads and open files must stay constant.

The mesh is dp=2 tp=2. Each step takes a new batch, and each seventh one is shorter, as the last of an epoch. Every 500
steps each rank notes its resident memory, open files, threads and Python objects, and the length of what the reports
print. The first 1,000 steps may grow: allocators and caches fill. A checkpoint is written in a thread every 100 steps.
In the middle one rank is stopped for five seconds, and the others must wait for it. In the last quarter one rank is
slower than the others, and the report of the step must name it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
from process_state import open_files, status
from profilers import positive
from ranks import on_ranks, together
from tables import printed
from torch import distributed

import autopar
from autopar.cli.train.model import llama
from autopar.cli.train.sizes import SIZES, VOCABULARY

PROFILES_ITSELF = True  # in other processes
AXES = {"dp": 2, "tp": 2}
ROWS, SHORT, LENGTH = 8, 4, 32
EPOCH = 7  # steps, of which the last has ``SHORT`` rows
GROWTH = 0.01  # of the resident memory, after the steps that may grow
STOPPED, PAUSE = 1, 5.0  # a rank that is stopped in the middle, and for how many seconds
SLOW, SLEEP = 3, 0.02  # a rank that sleeps between two steps of the last quarter
SAVED = 0.05  # of the time of the loop that saving may take
COLUMNS = ("step", "loss", "s", "captures", "RSS, MiB", "open files", "threads", "objects", "characters of reports")


class Noted(NamedTuple):
    """What a rank notes: KiB resident, open files, threads, objects, characters of reports."""

    resident: int
    files: int
    threads: int
    objects: int
    characters: int


class Row(NamedTuple):
    """What all ranks have noted after so many steps."""

    step: int
    loss: float
    seconds: float
    captures: int
    ranks: list[Noted]


class Soaked(NamedTuple):
    """The result of a run.

    Attributes:
        rows: the notes.
        saving: the seconds that the loop spent in calls of ``async_save``, and the seconds of the loop.
        with_saving, without: the median seconds of steps while a checkpoint is written, and of all other steps.
        stopped: the seconds of the step in which a rank was stopped; of the slowest rank.
        slow: the ranks that the report names before one is slow, and then.
    """

    rows: list[Row]
    saving: tuple[float, float]
    with_saving: float
    without: float
    stopped: float
    slow: tuple[tuple[int, ...], tuple[int, ...]]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=positive, default=5000)
    parser.add_argument("--every", type=positive, default=500, help="steps between two notes, a multiple of 10")
    parser.add_argument("--warm", type=positive, default=1000, help="steps in which memory may grow")
    parser.add_argument("--save", type=positive, default=100, help="steps between two checkpoints")


def batch(k: int) -> dict[str, torch.Tensor]:
    """The batch of step ``k``. Notes are made after long ones, so that reports are about the same programs."""
    rows = SHORT if k % EPOCH == EPOCH - 1 and (k + 1) % 10 else ROWS
    ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(k))
    return {"input_ids": ids, "labels": ids}


def noted(step: Any) -> Noted:
    gc.collect()
    passes = [row for row in step.reports if row.name != "ranks"]  # a slow rank has a line
    characters = len(f"{passes}{step.communication}{step.program}")
    return Noted(status("VmRSS"), open_files(), status("Threads"), len(gc.get_objects()), characters)


@contextlib.contextmanager
def stopped(seconds: float) -> Iterator[None]:
    """Stop this process soon, for so many seconds, by another one."""
    kill = f"sleep 0.2; kill -STOP {os.getpid()}; sleep {seconds}; kill -CONT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", kill]) as other:
        time.sleep(0.1)
        yield
        other.wait()


def soak(steps: int, every: int, save: int, folder: str) -> Soaked:
    model = llama(SIZES["tiny"], LENGTH, 0, torch.float32, torch.device("cpu"))
    parallel = autopar.parallelize(model, autopar.Mesh(AXES), "megatron")
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=1e-4))
    rows: list[Row] = []
    begun, saving, stop, named = time.monotonic(), 0.0, 0.0, tuple[int, ...]()
    times: dict[bool, list[float]] = {True: [], False: []}  # of steps by whether a checkpoint is written meanwhile
    rank, future = distributed.get_rank(), None
    for k in range(steps):
        before = time.monotonic()
        with stopped(PAUSE) if k == steps // 2 and rank == STOPPED else contextlib.nullcontext():
            while k == steps // 2 and rank == STOPPED and time.monotonic() - before < 1.0:
                time.sleep(0.05)  # until it is stopped
            loss: Any = step(**batch(k))
        taken = time.monotonic() - before
        if k == steps // 2:
            stop = max(together(taken))
        elif step.captures == 2 and k > EPOCH:
            times[future is not None and not future.done()].append(taken)
        if (k + 1) % every == 0:
            if future is not None:
                future.result()  # a checkpoint that is being written has a file open
            notes = together(noted(step))
            rows.append(Row(k + 1, float(loss), time.monotonic() - begun, step.captures, notes))
        if (k + 1) % save == 0:
            before = time.monotonic()
            state = {"step": step.state_dict(), "next": k + 1}
            future = autopar.checkpoint.async_save(folder, state)
            saving += time.monotonic() - before
        if k == 3 * steps // 4:
            named = tuple(slow.rank for slow in step.ranks.slow)
        if k > 3 * steps // 4 and rank == SLOW:
            time.sleep(SLEEP)
    slow = named, tuple(slow.rank for slow in step.ranks.slow)
    loop = time.monotonic() - begun
    return Soaked(rows, (saving, loop), *(median(times[kind] or [0.0]) for kind in (True, False)), stop, slow)


def run(options: argparse.Namespace) -> str:
    with tempfile.TemporaryDirectory() as folder:
        found = on_ranks(4, soak, options.steps, options.every, options.save, folder)
    table = [
        (str(row.step), f"{row.loss:.3f}", f"{row.seconds:.0f}", str(row.captures),
         *map(each, zip(*row.ranks, strict=True), FACTORS))
        for row in found.rows
    ]  # fmt: skip
    return printed(f"Each of four ranks, {AXES}", COLUMNS, table) + verdicts(found, options.warm)


FACTORS = (1 / 1024, 1, 1, 1, 1)


def each(values: Any, factor: float) -> str:
    return "  ".join(f"{value * factor:.0f}" for value in values)


def verdicts(found: Soaked, warm: int) -> str:
    """What must hold from the first note after the warm steps to the last one."""
    later = [row.ranks for row in found.rows if row.step >= warm]
    if len(later) < 2:
        return f"no verdict: fewer than two notes from step {warm} on\n"
    growth = max(last.resident / first.resident - 1 for first, last in zip(later[0], later[-1], strict=True))
    files, threads, objects, characters = (
        max(last[k] - first[k] for first, last in zip(later[0], later[-1], strict=True)) for k in range(1, 5)
    )
    saving, loop = found.saving
    before, after = found.slow
    return (
        verdict(f"resident memory grows by {growth:.2%} after {warm} steps, must be <= {GROWTH:.0%}", growth <= GROWTH)
        + verdict(f"open files grow by {files}, must be 0", files <= 0)
        + verdict(f"threads grow by {threads}, must be 0", threads <= 0)
        + f"Python objects grow by {objects}\n"
        + verdict(f"what reports print grows by {characters} characters, must be 0", characters <= 0)
        + verdict(
            f"a rank that was stopped for {PAUSE:g} s was waited for: this step took {found.stopped:.1f} s",
            found.stopped >= PAUSE,
        )
        + verdict(f"slow ranks that the report names, while rank {SLOW} is slow: {_text(after)}", after == (SLOW,))
        + f"and before it is slow: {_text(before)}\n"
        + verdict(
            f"saving in a thread keeps the loop for {saving:.2f} of {loop:.1f} s, {saving / loop:.2%}, must be <= "
            f"{SAVED:.0%}",
            saving <= SAVED * loop,
        )
        + f"a step takes {found.without * 1e3:.1f} ms, and {found.with_saving * 1e3:.1f} ms while a checkpoint is "
        f"written\n"
    )


def _text(ranks: tuple[int, ...]) -> str:
    return " ".join(map(str, ranks)) or "none"


def verdict(said: str, met: bool) -> str:
    return f"{said}: {'met' if met else 'missed'}\n"
