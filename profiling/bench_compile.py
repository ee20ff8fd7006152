"""Measure Llama-2-7B, forward and backward, to the local programs: seconds, memory, and growth with the layers.

The model is on meta, dims full, sequence 2048, Megatron over tp on dp=2 tp=2. Of several runs each part's fastest
counts. The exponent is that of seconds over nodes; 1 is linear. Memory is the peak (VmHWM) of a process of its own that
compiles once, and what it was before that.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from process_state import high_water

from autopar.capture import capture
from autopar.capture.provenance import Recorder
from autopar.examples.workloads import MESH, llama
from autopar.gc_pause import gc_paused
from autopar.passes import pipeline, run_passes
from autopar.plan.constraints import constraints
from autopar.plan.propagation import LayoutPropagation
from autopar.runtime.localize import localize, rank_classes
from autopar.verify.levels import verify

LINES = [LayoutPropagation.choose, Recorder.__torch_dispatch__, Recorder.observe]
PEAK = (
    "import sys; sys.path.insert(0, sys.argv[1]); import bench_compile; bench_compile.peak(int(sys.argv[2]), "
    "sys.argv[3])"
)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 32, 48, 96])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--preset", choices=("ddp", "megatron", "megatron+sp"), default="megatron")


def seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def measure(layers: int, preset: str) -> dict[str, float]:
    model, given = llama(layers)
    row: dict[str, float] = {}
    row["capture"], captured = seconds(lambda: capture(model, (), given))
    start = time.perf_counter()
    program = captured.program
    row["constraints"], (attrs, _) = seconds(lambda: constraints(preset, model, MESH, captured))
    row["verify"], _ = seconds(lambda: verify(program, "capture"))
    for mine in pipeline(MESH, attrs):
        whole, (report,) = seconds(lambda mine=mine: run_passes(program, [mine]))
        row[mine.name] = report.ms / 1e3
        row["verify"] += whole - report.ms / 1e3
    with gc_paused():
        row["localize"], local = seconds(
            lambda: [localize(program, MESH.coordinates(ranks[0])) for ranks in rank_classes(program)]
        )
        checked, _ = seconds(lambda: [verify(one, "localize") for one in local])
    row["verify"] += checked
    row["all after capture"] = time.perf_counter() - start
    row["nodes"] = len(program.graph.nodes)
    row["inserted"] = program.counts.inserted
    return row


def fastest(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: min(row[name] for row in rows) for name in rows[0]}


def peak(layers: int, preset: str) -> None:
    """Prints the megabytes of a process that compiles once, and those it began with."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    before = high_water()
    measure(layers, preset)
    print(high_water(), before)


def run(options: argparse.Namespace) -> str:
    measure(2, options.preset)  # first imports, caches of rules
    rows = {
        layers: fastest([measure(layers, options.preset) for _ in range(options.repeat)]) for layers in options.layers
    }
    lines = [f"{'':20}" + "".join(f"{layers:>10}" for layers in rows) + f"{'exponent':>10}"]
    nodes = np.log([row["nodes"] for row in rows.values()])
    for name in next(iter(rows.values())):
        values = [row[name] for row in rows.values()]
        counted = name in ("nodes", "inserted")
        exponent = "" if counted or len(rows) < 2 else f"{np.polyfit(nodes, np.log(values), 1)[0]:10.2f}"
        lines.append(f"{name:20}" + "".join(f"{v:10.0f}" if counted else f"{v:10.3f}" for v in values) + exponent)
    said = [PEAK, sys.path[0], str(max(options.layers)), options.preset], [PEAK, sys.path[0], "32", options.preset]
    for command in said:
        out = subprocess.run(
            [sys.executable, "-c", *command], check=True, capture_output=True, text=True
        ).stdout.split()
        lines.append(
            f"peak memory with {command[2]} layers, cold process: {out[-2]} MB, of which {out[-1]} MB before (torch, "
            f"transformers)"
        )
    return (
        f"{options.preset} on {MESH}, {torch.get_num_threads()} threads; seconds, counts by layers\n"
        + "\n".join(lines)
        + "\n"
    )
