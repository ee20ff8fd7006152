"""Measure the start of a training on two processes, and its first shorter batch: seconds, cold and warm, beside DDP.

A GPT of 0.8 M parameters trains on gloo, in six batches of 32 rows and one of 8. The first step ends so many seconds
after torchrun was started; a warm start finds what an earlier one has kept in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from profilers import positive
from tables import printed

PROFILES_ITSELF = True  # in other processes
SCRIPT = Path(__file__).with_name("start_ranks.py")
KINDS = ("DDP", "plain loop", "step", "searched step")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--starts", type=positive, default=3, help="warm ones, of which the median is printed")


def started(kind: str, folder: str) -> dict[str, float]:
    """Start the training, and return its times in seconds."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"AUTOPAR_CACHE": folder, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # users' starts do not compile the sources
    command = [*torchrun, SCRIPT, kind, str(time.time())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    line = next((line for line in done.stdout.splitlines() if line.startswith("times ")), None)
    if line is None:
        raise SystemExit(f"{kind}: {done.stderr[-2000:]}")
    return json.loads(line.removeprefix("times "))


def run(options: argparse.Namespace) -> str:
    rows: list[list[str]] = []
    warm_ddp = 0.0
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            cold = started(kind, folder)
            found = [started(kind, folder) for _ in range(options.starts)]
        warm = {name: statistics.median(each[name] for each in found) for name in cold}
        warm_ddp = warm["first"] if kind == "DDP" else warm_ddp
        beside = f"{warm['first'] / warm_ddp:.2f}" if warm_ddp else "–"
        row = [*(cold[name] for name in ("first", "shorter")), *(warm[name] for name in ("first", "shorter", "usual"))]
        rows.append([kind, *(f"{seconds:.2f}" for seconds in row), beside])
        print(*rows[-1], file=sys.stderr, flush=True)
    columns = ["", "first, cold", "shorter, cold", "first, warm", "shorter, warm", "usual", "first, warm, beside DDP"]
    return printed("seconds until the first step has ended; of the shorter and of a usual step", columns, rows)
