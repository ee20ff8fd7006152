"""Measure the search of the cheapest plan of Llama 3 by depth and mesh, and compare the plan with presets.

Each search runs in a process of its own. ``capture`` to ``solver`` are CPU seconds of one thread, and ``memory`` is
what the peak of the process rises by from capture on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any
from unittest import mock

import torch
from process_state import high_water
from profilers import positive

import autopar
from autopar import Mesh
from autopar.capture import capture
from autopar.costs.machine import machine
from autopar.plan.boundary import Boundary
from autopar.search.problem import build, payments
from autopar.search.problem.problem import Problem
from autopar.search.solutions.found import found_by
from autopar.search.solver.solver import solve
from autopar.search.starts.starting_points import starting_points

MACHINE = "NVIDIA H100 80GB HBM3"
MODELS = {  # name → hidden size, inner size, heads, heads of keys and values
    "8B": (4096, 14336, 32, 8),
    "70B": (8192, 28672, 64, 8),
}
CASES = (  # model, layers, mesh, seconds that the search may take
    ("8B", 1, "8", 60), ("8B", 32, "8", 60), ("8B", 1, "8x8", 60), ("8B", 4, "8x8", 60), ("8B", 32, "8x8", 60),
    ("70B", 80, "8x8", 60), ("8B", 1, "8x8x4", 60), ("8B", 32, "8x8x4", 60),
)  # fmt: skip
LIMITS = (1, 2, 4, 8)  # seconds, for 32 layers on 8x8
BESIDE = (  # what the search is compared with: layers, mesh, machine
    (2, "8x8", MACHINE), (2, "8x8", "generic"), (2, "2x2", "cpu"),
)  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=positive, default=80, help="leave out deeper models")
    parser.add_argument("--case", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> str:
    if options.case:
        *case, what = json.loads(options.case)
        measure = _pairwise if what == "pairwise" else _limited if isinstance(what, list) else _measured
        return json.dumps(measure(*case, what)) + "\n"
    rows = [
        f"{'model':5} {'layers':>6} {'mesh':>6} {'capture':>8} {'tables':>7} {'solver':>7} {'memory':>8} "
        f"{'a step':>14} {'gap':>9}"
    ]
    for case in CASES:
        if case[1] > options.layers:
            continue
        m = searched_alone(case)
        rows.append(
            f"{case[0]:5} {case[1]:6} {case[2]:>6} {m['capture']:7.1f}s {m['tables']:6.1f}s {m['solver']:6.1f}s "
            f"{m['memory']:5.0f} MB {m['ms']:11,.3f} ms {m['gap']:9.1e}"
        )
    if options.layers >= 32:
        rows += ["", "8B, 32 layers, 8x8: the solver ended early", ""]
        limited = searched_alone(("8B", 32, "8x8", LIMITS))
        rows += [
            f"{limit:4} s {ms:11,.3f} ms {gap:9.1e}"
            for limit, (ms, gap) in zip(LIMITS, limited["limited"], strict=True)
        ]
    rows += ["", "8x8: each use pays for its transfers, and shared ones are paid once", ""]
    for layers in (1, 4, 32):
        if layers <= options.layers:
            pairwise = searched_alone(("8B", layers, "8x8", "pairwise"))
            rows.append(f"8B, {layers:2} layers {pairwise['pairwise']:11,.3f} ms, {pairwise['once']:11,.3f} ms")
    rows += ["", "Milliseconds of the explicit program: the search beside presets, each with its axes on (a, b)", ""]
    for layers, mesh, device in BESIDE:
        prices = _beside(layers, mesh, device)
        best = prices["search"]
        rows.append(f"8B, {layers} layers, {mesh}, {device}")
        rows += [f"  {name:24} {ms:12,.3f}  {ms / best - 1:+8.1%}" for name, ms in prices.items()]
    return "\n".join([*rows, ""])


def searched_alone(case: tuple[Any, ...]) -> dict[str, Any]:
    command = [sys.executable, __file__.replace("bench_search", "run"), "search", "--case", json.dumps(case)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.strip().splitlines()[-1])


def _mesh(text: str) -> Mesh:
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
    model, inputs = llama(name, layers)
    start = time.process_time()
    program = capture(model, (), inputs).program
    captured, before = time.process_time(), _peak()
    begin = time.monotonic()
    on = machine(MACHINE)
    problem = build.build(Boundary(program, _mesh(mesh)), on)
    built = time.process_time()
    answer = problem.bounded(solve(problem.graph, problem.order, problem.labels, begin + limit))
    found = found_by(answer, problem, on, begin, limit)
    solved = time.process_time()
    return {
        "capture": captured - start, "tables": built - captured, "solver": solved - built,
        "memory": (_peak() - before) / 1e6, "ms": found.nanoseconds / 1e6, "gap": found.gap,
        "peak": high_water(),
    }  # fmt: skip


def _limited(name: str, layers: int, mesh: str, limits: list[float]) -> dict[str, Any]:
    """Return the milliseconds and the gap of answers after so many seconds of the solver."""
    problem = _problem(name, layers, mesh)
    rows = []
    for limit in limits:
        answer = solve(problem.graph, problem.order, problem.labels, time.monotonic() + limit)
        cost = problem.explicit_price(answer.states.tolist())
        rows.append((cost / 1e6, max(0.0, 1 - answer.bound / cost)))
    return {"limited": rows}


def _pairwise(name: str, layers: int, mesh: str, _: str) -> dict[str, float]:
    """Return the milliseconds of the explicit program, where the search lets each use pay, and where it does not."""
    found = {}
    alone = mock.patch.object(payments, "groups_of", lambda value: [([reader], 1.0, 1.0) for reader in value.readers])
    for model, patch in (("once", contextlib.nullcontext()), ("pairwise", alone)):
        with patch:
            problem = _problem(name, layers, mesh)
            answer = solve(problem.graph, problem.order, problem.labels)
        found[model] = problem.explicit_price(answer.states.tolist()) / 1e6
    return found


def _problem(name: str, layers: int, mesh: str) -> Problem:
    model, inputs = llama(name, layers)
    program = capture(model, (), inputs).program
    return build.build(Boundary(program, _mesh(mesh)), machine(MACHINE))


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _beside(layers: int, mesh: str, device: str) -> dict[str, float]:
    """Return the milliseconds of the search and of the best assignment of axes of each preset."""
    model, inputs = llama("8B", layers)
    on = _mesh(mesh)
    prices = {}
    parallel = autopar.parallelize(model, on, "search", example=inputs, machine=device)
    assert parallel.solution is not None
    prices["search"] = parallel.solution.seconds * 1e3
    for name, layouts in starting_points(model, capture(model, (), inputs), on):
        explicit = capture(model, (), inputs).program
        autopar.passes.run_passes(explicit, autopar.passes.pipeline(on, layouts, machine=device))
        prices[name] = autopar.price(explicit, device).seconds * 1e3
    return dict(sorted(prices.items(), key=lambda item: item[1])[:8])
