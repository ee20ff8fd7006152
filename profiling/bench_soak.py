"""Train a tiny Llama for 2,000 steps on four processes, and see whether memory and open files stay constant.

The mesh is dp=2 tp=2. Each step takes a new batch, and each seventh one is shorter, as the last of an epoch. Every 200
steps each rank notes its resident memory, open files, threads and Python objects. The first 400 steps may grow:
allocators and caches fill.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import torch
from process_state import open_files, status
from profilers import positive
from ranks import on_ranks, together
from tables import printed

import autopar
from autopar.cli.train.model import llama
from autopar.cli.train.sizes import SIZES, VOCABULARY

PROFILES_ITSELF = True  # in other processes
AXES = {"dp": 2, "tp": 2}
ROWS, SHORT, LENGTH = 8, 4, 32
EPOCH = 7  # steps, of which the last has ``SHORT`` rows
GROWTH = 0.01  # of the resident memory, after the steps that may grow
COLUMNS = ("step", "loss", "s", "captures", "RSS, MiB", "open files", "threads", "objects")

Noted = tuple[int, int, int, int]  # KiB resident, open files, threads, objects of a rank


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=positive, default=2000)
    parser.add_argument("--every", type=positive, default=200, help="steps between two notes")
    parser.add_argument("--warm", type=positive, default=400, help="steps in which memory may grow")


def batch(k: int) -> dict[str, torch.Tensor]:
    """The batch of step ``k``."""
    rows = SHORT if k % EPOCH == EPOCH - 1 else ROWS
    ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(k))
    return {"input_ids": ids, "labels": ids}


def noted() -> Noted:
    gc.collect()
    return status("VmRSS"), open_files(), status("Threads"), len(gc.get_objects())


def soak(steps: int, every: int) -> list[tuple[int, float, float, int, list[Noted]]]:
    """Step, loss, seconds since the start, captures, and what each rank noted."""
    model = llama(SIZES["tiny"], LENGTH, 0, torch.float32, torch.device("cpu"))
    parallel = autopar.parallelize(model, autopar.Mesh(AXES), "megatron")
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=1e-4))
    rows, begun = [], time.monotonic()
    for k in range(steps):
        loss: Any = step(**batch(k))
        if (k + 1) % every == 0:
            rows.append((k + 1, float(loss), time.monotonic() - begun, step.captures, together(noted())))
    return rows


def run(options: argparse.Namespace) -> str:
    rows = on_ranks(4, soak, options.steps, options.every)
    table = [
        (str(step), f"{loss:.3f}", f"{seconds:.0f}", str(captures), *map(each, zip(*ranks, strict=True), FACTORS))
        for step, loss, seconds, captures, ranks in rows
    ]
    return printed(f"Each of four ranks, {AXES}", COLUMNS, table) + verdict(rows, options.warm)


FACTORS = (1 / 1024, 1, 1, 1)


def each(values: Any, factor: float) -> str:
    return "  ".join(f"{value * factor:.0f}" for value in values)


def verdict(rows: list[tuple[int, float, float, int, list[Noted]]], warm: int) -> str:
    """Growth of each rank from the first note after the warm steps to the last one."""
    later = [ranks for step, *_, ranks in rows if step >= warm]
    if len(later) < 2:
        return f"no verdict: fewer than two notes from step {warm} on\n"
    growth = max(last[0] / first[0] - 1 for first, last in zip(later[0], later[-1], strict=True))
    files, threads, objects = (
        max(max(rank) - min(rank) for rank in zip(*([one[k] for one in ranks] for ranks in later), strict=True))
        for k in (1, 2, 3)
    )
    return (
        f"resident memory: grows by {growth:.2%} after {warm} steps, must be <= {GROWTH:.0%}: "
        f"{'met' if growth <= GROWTH else 'missed'}\n"
        f"open files: change by {files}, must be 0: {'met' if files == 0 else 'missed'}\n"
        f"threads change by {threads}, Python objects by {objects}\n"
    )
