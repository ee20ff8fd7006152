"""Train a small Llama that goes on after a loss, and print the times of each start, for ``bench_elastic``."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import autopar
from autopar.cli.train.model import llama
from autopar.cli.train.sizes import SIZES, VOCABULARY

ROWS, LENGTH, EVERY = 8, 64, 5


def began() -> float:
    """The time when this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    folder, size, pause = sys.argv[1], sys.argv[2], float(sys.argv[3])
    times = {"started": began(), "imported": time.time()}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    chosen = autopar.elastic.choose("dp=2,tp=2", "dp=1,tp=2", global_batch=ROWS, micro_batch=4)
    model = llama(SIZES[size], LENGTH, 0, torch.float32, torch.device("cpu"))
    parallel = autopar.parallelize(model, chosen.mesh, "megatron")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
    step = parallel.train_step(optimizer, microbatches=chosen.microbatches)
    times["parallelized"] = time.time()
    batches = [{"input_ids": ids, "labels": ids}]
    left = autopar.elastic.batches(folder, step, batches, steps=10_000, every=EVERY)
    times["loaded"] = time.time()
    first = True
    for batch in left:
        step(batch)
        if os.environ["RANK"] == "0":
            if first:
                times["stepped"] = time.time()
                print(f"times {json.dumps(times | {'lost': left.start.lost, 'ranks': chosen.mesh.size})}", flush=True)
            print(f"step {step.steps}", flush=True)
        first = False
        time.sleep(pause)


if __name__ == "__main__":
    main()
