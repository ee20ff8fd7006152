"""Compare the predicted and the measured time of training steps of six plans on four gloo processes.

First the collectives and ops of this machine are measured with all four processes at work, one thread each. Then all
processes train the Llama of ``step`` by SGD, on eight sequences, with one plan after the other. Plans take turns, in
rounds; a step's time is that of its slowest rank, a plan's the median over the rounds. Predicted is
``autopar.price(step.program, machine)``, the serial sum. Without ``gc``: a collection would hit one plan of a round.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as multiprocessing
from profilers import positive
from step_rivals import batch, llama
from torch import distributed

import autopar
from autopar import Mesh
from autopar.costs import calibrate, measurements
from autopar.costs.machine import Machine

RANKS, ROWS = 4, 8
PLANS = (  # name, mesh, plan, zero
    ("search", Mesh(a=2, b=2), "search", 0), ("ddp", Mesh(dp=4), "ddp", 0), ("ddp, zero 3", Mesh(dp=4), "ddp", 3),
    ("megatron, tp=4", Mesh(tp=4), "megatron", 0), ("megatron+sp, tp=4", Mesh(tp=4), "megatron+sp", 0),
    ("megatron, dp=2 tp=2", Mesh(dp=2, tp=2), "megatron", 0),
)  # fmt: skip

PROFILES_ITSELF = True


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=positive, default=8)


def run(options: argparse.Namespace) -> str:
    found = calibrate.calibrated(measurements.in_processes(RANKS, options.rounds, measurements.SIZES), "this", "here")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "machine.json")
        found.machine.save(file)
        multiprocessing.spawn(work, (folder, options.rounds), nprocs=RANKS)
        rows = json.loads(Path(folder, "found.json").read_text())
    lines = [f"{'plan':22} {'predicted':>12} {'measured':>12} {'ratio':>7}"]
    for name, (predicted, measured) in sorted(rows.items(), key=lambda row: row[1][1]):
        lines.append(f"{name:22} {predicted * 1e3:9.1f} ms {measured * 1e3:9.1f} ms {predicted / measured:7.2f}")
    predicted, measured = zip(*rows.values(), strict=True)
    errors = [abs(p / m - 1) for p, m in rows.values()]
    rank = np.corrcoef(*(np.argsort(np.argsort(seconds)) for seconds in (predicted, measured)))[0, 1]
    lines += ["", f"Spearman {rank:.2f}; error, median {statistics.median(errors):.0%}, largest {max(errors):.0%}", ""]
    return "\n".join(lines)


def work(rank: int, folder: str, rounds: int) -> None:
    """What one process does; the first one writes seconds of each plan, predicted and measured."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    inputs, machine = batch(ROWS // 2), Machine.load(Path(folder, "machine.json"))
    steps, predicted = {}, {}
    for name, mesh, plan, zero in PLANS:
        parallel = autopar.parallelize(llama(), mesh, plan, machine=machine, memory=float("inf"))
        step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=1e-3), zero=zero)
        step(**inputs)
        steps[name], predicted[name] = step, autopar.price(step.program, machine).seconds
    gc.collect()
    gc.disable()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            distributed.barrier()
            begin = time.perf_counter()
            step(**inputs)
            own = torch.tensor(time.perf_counter() - begin)
            distributed.all_reduce(own, distributed.ReduceOp.MAX)
            taken[name].append(float(own))
    if rank == 0:
        rows = {name: (predicted[name], statistics.median(taken[name])) for name in steps}
        Path(folder, "found.json").write_text(json.dumps(rows))
    distributed.barrier()
    distributed.destroy_process_group()
