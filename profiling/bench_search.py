"""Measure the search of the cheapest plan of Llama 3 by depth and mesh, and compare the plan with presets.

Each search runs in a process of its own. ``capture`` to ``solver`` are CPU seconds of one thread, and ``memory`` is
what the peak of the process rises by from capture on.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

import torch
from profilers import positive

MACHINE = "NVIDIA H100 80GB HBM3"
MODELS = {  # name → hidden size, inner size, heads, heads of keys and values
    "8B": (4096, 14336, 32, 8),
    "70B": (8192, 28672, 64, 8),
}
CASES = (  # model, layers, mesh, seconds that the search may take
    ("8B", 1, "8", 60), ("8B", 32, "8", 60), ("8B", 1, "8x8", 60), ("8B", 4, "8x8", 60), ("8B", 32, "8x8", 60),
    ("70B", 80, "8x8", 60),
)  # fmt: skip
BESIDE = (  # what the search is compared with: layers, mesh, machine
    (2, "8x8", MACHINE), (2, "8x8", "generic"), (2, "2x2", "cpu"),
)  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=positive, default=80, help="leave out deeper models")
    parser.add_argument("--case", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> str:
    if options.case:
        return json.dumps(_measured(*json.loads(options.case))) + "\n"
    rows = [
        f"{'model':5} {'layers':>6} {'mesh':>6} {'capture':>8} {'tables':>7} {'solver':>7} {'memory':>8} "
        f"{'a step':>14} {'gap':>9}"
    ]
    for case in CASES:
        if case[1] > options.layers:
            continue
        m = _in_a_process(case)
        rows.append(
            f"{case[0]:5} {case[1]:6} {case[2]:>6} {m['capture']:7.1f}s {m['tables']:6.1f}s {m['solver']:6.1f}s "
            f"{m['memory']:5.0f} MB {m['ms']:11,.3f} ms {m['gap']:9.1e}"
        )
    rows += ["", "Milliseconds of the explicit program: the search beside presets, each with its axes on (a, b)", ""]
    for layers, mesh, machine in BESIDE:
        prices = _beside(layers, mesh, machine)
        best = prices["search"]
        rows.append(f"8B, {layers} layers, {mesh}, {machine}")
        rows += [f"  {name:24} {ms:12,.3f}  {ms / best - 1:+8.1%}" for name, ms in prices.items()]
    return "\n".join([*rows, ""])


def _in_a_process(case: tuple[Any, ...]) -> dict[str, float]:
    command = [sys.executable, __file__.replace("bench_search", "run"), "search", "--case", json.dumps(case)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.strip().splitlines()[-1])


def _mesh(text: str) -> Any:
    from autopar import Mesh

    return Mesh(dict(zip("abc", map(int, text.split("x")), strict=False)))


def llama(name: str, layers: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return Llama 3 with so many layers, on meta, in bfloat16, and a batch of 8 sequences of 8192 with labels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, inner, heads, kv = MODELS[name]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, vocab_size=128256, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        ids = torch.zeros(8, 8192, dtype=torch.long)
        return LlamaForCausalLM(config).to(torch.bfloat16), {"input_ids": ids, "labels": ids}


def _measured(name: str, layers: int, mesh: str, limit: float) -> dict[str, float]:
    from autopar.capture import capture
    from autopar.costs.machine import machine
    from autopar.plan.boundary import Boundary
    from autopar.search.build import build
    from autopar.search.search import found_by
    from autopar.search.solver import solve

    model, inputs = llama(name, layers)
    start = time.process_time()
    program = capture(model, (), inputs).program
    captured, before = time.process_time(), _peak()
    begin = time.monotonic()
    on = machine(MACHINE)
    problem = build(Boundary(program, _mesh(mesh)), on)
    built = time.process_time()
    answer = solve(problem.graph, problem.order, problem.labels, begin + limit)
    found = found_by(answer, problem, on, begin, limit)
    solved = time.process_time()
    return {
        "capture": captured - start, "tables": built - captured, "solver": solved - built,
        "memory": (_peak() - before) / 1e6, "ms": found.nanoseconds / 1e6, "gap": found.gap,
    }  # fmt: skip


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _beside(layers: int, mesh: str, machine: str) -> dict[str, float]:
    """Return the milliseconds of the search and of the best assignment of axes of each preset."""
    import autopar
    from autopar.capture import capture
    from autopar.search.starting_points import starting_points

    model, inputs = llama("8B", layers)
    on = _mesh(mesh)
    prices = {}
    parallel = autopar.parallelize(model, on, "search", example=inputs, machine=machine)
    assert parallel.solution is not None
    prices["search"] = parallel.solution.seconds * 1e3
    for name, layouts in starting_points(model, capture(model, (), inputs), on):
        explicit = capture(model, (), inputs).program
        autopar.passes.run_passes(explicit, autopar.passes.pipeline(on, layouts, machine=machine))
        prices[name] = autopar.price(explicit, machine).seconds * 1e3
    return dict(sorted(prices.items(), key=lambda item: item[1])[:8])
