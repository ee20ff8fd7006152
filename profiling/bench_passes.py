"""Measure each pass on residual MLPs of growing depth: milliseconds, nodes, commits, and the fitted exponent.

The exponent is that of milliseconds over nodes; 1 is linear. Reshard is run with one commit, one a reshard and one an
operation, on copies of one placed program, in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from autopar.capture import capture
from autopar.examples.workloads import MESH, PLAN, mlp
from autopar.gc_pause import gc_paused
from autopar.ir.commit import Changes
from autopar.ir.edit import Edit
from autopar.ir.program import Program
from autopar.passes import Place, Reshard, Share
from autopar.passes.reshard import MODES
from autopar.plan.constraints import constraints
from autopar.runtime.localize import localize
from autopar.verify.levels import verify

LINES = [Reshard.run, Edit.insert, Changes.insert, Changes.settle]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 96])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["batched"])


def clock(function: Callable[[], object]) -> float:
    with gc_paused():  # as the passes run
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e3


def measure(layers: int, modes: list[str]) -> dict[str, float]:
    model, x = mlp(layers)
    row: dict[str, float] = {}
    start = time.perf_counter()
    captured = capture(model, (x,))
    row["capture"] = (time.perf_counter() - start) * 1e3
    program = captured.program
    attrs, _ = constraints(PLAN, model, MESH, captured)
    row["place"] = clock(lambda: Place(MESH, attrs).run(program))
    program.level = "placed"
    copies: dict[str, Program] = {mode: program.copy() for mode in modes}
    for mode, copy in copies.items():
        row[f"reshard {mode}"] = clock(lambda copy=copy, mode=mode: Reshard(mode).run(copy))
        copy.level = "explicit"
    program = copies[modes[0]]
    assert all(str(copy) == str(program) for copy in copies.values())
    row["share"] = clock(lambda: Share().run(program))
    row["verify"] = clock(lambda: verify(program))
    row["localize"] = clock(lambda: localize(program, dict.fromkeys(MESH.names, 0)))
    row["print"] = clock(lambda: str(program))
    text = str(program)
    row["parse"] = clock(lambda: Program.parse(text))
    row["nodes"] = len(program.graph.nodes)
    row["inserted"] = program.counts.inserted
    for mode, copy in copies.items():
        row[f"commits {mode}"] = copy.counts.commits
    return row


def run(options: argparse.Namespace) -> str:
    measure(2, options.modes)  # caches of rules, first imports
    rows = {layers: measure(layers, options.modes) for layers in options.layers}
    names = list(next(iter(rows.values())))
    lines = [f"{'':20}" + "".join(f"{layers:>10}" for layers in rows) + f"{'exponent':>10}"]
    nodes = np.log([row["nodes"] for row in rows.values()])
    for name in names:
        values = [row[name] for row in rows.values()]
        counted = name in ("nodes", "inserted") or name.startswith("commits")
        exponent = "" if counted or len(rows) < 2 else f"{np.polyfit(nodes, np.log(values), 1)[0]:10.2f}"
        lines.append(
            f"{name:20}" + "".join(f"{value:10.0f}" if counted else f"{value:10.1f}" for value in values) + exponent
        )
    return "layers; milliseconds, counts\n" + "\n".join(lines) + "\n"
