"""Measure the start of a searched training step, cold and from the cache: Llama-3-8B on meta, dp=8 tp=8.

Each start is a process of its own, with one thread; imports are not counted. ``programs`` is from ``train_step`` to the
explicit programs of the step, and ``local`` from there to the program of rank 0. Of several warm starts the fastest
counts. All starts must make the same text, with modules and lines. A second table has a step with open options, of
fewer layers: its first start compares micro-batches and ways to recompute.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tables import printed

PROFILES_ITSELF = True  # in other processes
MACHINE = "NVIDIA H100 80GB HBM3"
COLUMNS = ("start", "imports", "parallelize", "train_step", "key, guards, read", "programs", "local", "all but imports")
START = "import sys; sys.path.insert(0, sys.argv[1]); import bench_cache; bench_cache.start(*sys.argv[2:])"
OPENED = {"microbatches": "search", "recompute": "search"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--opened", type=int, default=4, help="layers of the step with open options")
    parser.add_argument("--repeat", type=int, default=3)


def run(options: argparse.Namespace) -> str:
    closed = _starts(options.layers, options.repeat, {}, "searched train_step")
    opened = _starts(options.opened, options.repeat, OPENED, ", ".join(f'{name}="{OPENED[name]}"' for name in OPENED))
    return f"{closed}\n{opened}"


def _starts(layers: int, repeat: int, chosen: dict[str, str], what: str) -> str:
    """Start once without and some times with the cache, and return a table. ``chosen``: options of the step."""
    with tempfile.TemporaryDirectory() as folder:
        starts = [started(layers, folder, chosen) for _ in range(1 + repeat)]
        size = sum(file.stat().st_size for file in Path(folder).rglob("*.json"))
    cold, warm = starts[0], min(starts[1:], key=lambda row: row["all but imports"])
    assert len({row["digest"] for row in starts}) == 1, "the starts have made different programs"
    assert all(row["hits"] == 2 for row in starts[1:]), "a warm start has missed"
    rows = [(name, *(f"{row[column]:.2f}" for column in COLUMNS[1:])) for name, row in (("cold", cold), ("warm", warm))]
    table = printed(f"Llama-3-8B, {layers} layers, dp=8 tp=8, {what}: seconds", COLUMNS, rows)
    return f"{table}entries: {size / 1e6:.1f} MB\n"


def started(layers: int, folder: str, chosen: dict[str, str]) -> dict[str, Any]:
    """What one start took, in a process of its own."""
    made = subprocess.run(
        [sys.executable, "-c", START, str(Path(__file__).parent), str(layers), folder, json.dumps(chosen)],
        stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return json.loads(made.stdout.splitlines()[-1])


def start(layers: str, folder: str, chosen: str) -> None:
    """Print what this start takes. ``chosen``: options of the step, as JSON."""
    begun = time.perf_counter()
    import autopar.step.pipelined.train_step
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import autopar
    from autopar.ir.program import text_digest

    parallelize = autopar.parallelize  # autopar loads it when it is asked for
    row = {"imports": time.perf_counter() - begun}
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=int(layers),
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0,
        use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(config), torch.zeros(8, 2048, dtype=torch.long)

    def part(name: str, since: float) -> float:
        row[name] = time.perf_counter() - since
        return time.perf_counter()

    begun = now = time.perf_counter()
    parallel = parallelize(model, autopar.Mesh(dp=8, tp=8), machine=MACHINE, time_limit=600.0, cache=folder)
    now = part("parallelize", now)
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=1e-4), **json.loads(chosen))
    now = part("train_step", now)
    step.capture({"input_ids": ids, "labels": ids})
    now = part("programs", now)
    local = step.local(0)
    part("local", now)
    row["all but imports"] = time.perf_counter() - begun
    notes = [report for report in step.reports if report.name.endswith("cache")]
    row["key, guards, read"] = sum(report.ms for report in notes) / 1e3
    row["hits"] = sum(report.notes[0].startswith("hit") for report in notes)
    text = f"{step.program.text(comments=True)}{local}"
    print(json.dumps({**row, "digest": text_digest(text)}))
