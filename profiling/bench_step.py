"""One training step on 1, 2 and 4 processes, beside eager, DistributedDataParallel, FSDP2, DTensor and a Megatron by hand.

A step is forward, backward and zero_grad, without an optimizer, of a Llama with two layers of 256 and two sequences of
128 tokens a rank; gloo processes with one thread each. Before anything is timed, all systems give the loss and the
gradients of the plain model on the whole batch. They are timed in turn, in rounds: a barrier, one step that does not
count, a barrier, some steps. A round's time is that of its slowest rank. Times and ratios are medians over the rounds,
with quartiles; ratios are taken within a round. Under a tool, only autopar's steps run, and rank 0's are shown.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from peak import peak_bytes
from rich.console import Console
from rich.table import Table
from step_rivals import FAMILIES, System, batch, llama, one_process
from torch import distributed, nn

import autopar
from autopar.parallel import Parallel
from autopar.runtime.process_step import ProcessStep, _Step

LINES = [Parallel.forward, Parallel.pieces, Parallel._gradient, ProcessStep.forward, _Step.forward, _Step.backward]
SAME = 1e-5  # loss and the norm of all gradients, relatively
TINY = 300  # ops forward
ONE = "one process"

PROFILES_ITSELF = True


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3, help="timed, of each system in each round")


# -- in a process ------------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """Elementwise ops on four numbers: what is timed is all but the arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        for _ in range(TINY // 2):
            x = torch.sigmoid(torch.tanh(x))
        return x.sum()


def barrier() -> None:
    if distributed.is_initialized():
        distributed.barrier()


def slowest(seconds: float) -> float:
    if not distributed.is_initialized():
        return seconds
    every = torch.tensor([seconds], dtype=torch.float64)
    distributed.all_reduce(every, distributed.ReduceOp.MAX)
    return every.item()


def in_rounds(calls: dict[str, Callable[[], Any]], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of one call on the slowest rank, in each round. Who is first changes from round to round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    gc.collect()
    for round in range(rounds):
        first = round % len(names)
        for name in names[first:] + names[:first]:
            call = calls[name]
            barrier()
            call()
            barrier()
            start = time.perf_counter()
            for _ in range(steps):
                call()
            times[name].append(slowest((time.perf_counter() - start) / steps))
    return times


def whole_step(system: System) -> Callable[[], None]:
    def call() -> None:
        system.step()
        system.clear()

    return call


def check(system: System, reference: System) -> None:
    """Refuses a system whose loss or gradients are not the plain model's on the whole batch."""
    (loss, found), (expected, gradients) = system.numbers(), reference.numbers()
    assert found.keys() == gradients.keys(), system.name
    norm, other = (torch.stack([g.double().norm() for g in some.values()]).norm() for some in (gradients, found))
    apart = torch.stack([(found[name] - gradients[name]).double().norm() for name in gradients]).norm()
    for what, error in (("loss", (loss - expected).abs() / expected), ("norm", (other - norm).abs() / norm), ("gradients", apart / norm)):
        if error > SAME:
            raise AssertionError(f"{system.name}: {what} differs by {error:.1e}, relatively")


def profiled(tool: str, call: Callable[[], None], steps: int) -> str:
    """What a tool says of some steps; the other ranks run the same steps."""
    call()
    if tool == "lines":
        from line_profiler import LineProfiler

        lines = LineProfiler(*LINES)
        lines.runcall(lambda: [call() for _ in range(steps)])
        out = io.StringIO()
        lines.print_stats(out, stripzeros=True)
        return out.getvalue()
    profile = cProfile.Profile()
    profile.runcall(lambda: [call() for _ in range(steps)])
    rows: dict[str, list[float]] = {}
    for entry in profile.getstats():  # not by pstats: to it all ATen ops are one function, and it keeps the last
        row = rows.setdefault(label(entry.code), [0, 0, 0])
        for k, value in enumerate((entry.callcount / steps, entry.inlinetime / steps * 1e3, entry.totaltime / steps * 1e3)):
            row[k] += value
    table = f"{'calls':>10}{'own ms':>10}{'ms':>10}  of a step\n"
    for name, (calls, own, total) in sorted(rows.items(), key=lambda row: -row[1][1])[:15]:
        table += f"{calls:10.0f}{own:10.2f}{total:10.2f}  {name}\n"
    return table


def label(code: Any) -> str:
    if isinstance(code, str):
        return code
    return f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_name}"


def tiny(options: argparse.Namespace) -> tuple[dict[str, list[float]], int]:
    """Seconds of a step on tiny tensors, ours and eager's, and how many nodes ours runs."""
    parallel, eager, x = autopar.parallelize(Tiny(), autopar.Mesh(dp=1), "ddp"), Tiny(), torch.randn(2, 2)

    def step(model: nn.Module) -> None:
        model(x).backward()
        model.zero_grad()

    parallel.capture(x)
    nodes = sum(node.op == "call_function" for node in parallel.local(0).graph.nodes)
    return in_rounds({"autopar": lambda: step(parallel), "eager": lambda: step(eager)}, options.rounds, 10), nodes


def work(rank: int, ranks: int, folder: str, options: argparse.Namespace) -> None:
    """What one process does. The first one writes its findings into ``folder``."""
    torch.set_num_threads(1)
    if ranks > 1:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found: dict[str, Any] = {}
    model = llama()
    for family, make in FAMILIES.items() if ranks > 1 else [(ONE, one_process)]:
        systems = make(model)
        reference = System("plain", model, batch(ranks if family == "data" else 1))
        for system in systems:
            check(system, reference)
        calls = {system.name: whole_step(system) for system in systems}
        if options.tool != "time":
            found[family] = {"shown": profiled(options.tool, calls["autopar"], options.rounds)}
            continue
        found[family] = {"seconds": in_rounds(calls, options.rounds, options.steps), "aims": {s.name: s.aim for s in systems}}
        if family == ONE:
            found[family]["bytes"] = {name: peak_bytes(call) for name, call in calls.items()}
            found[family]["tiny"], found[family]["nodes"] = tiny(options)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    if ranks > 1:
        distributed.barrier()
        distributed.destroy_process_group()


# -- what is printed ---------------------------------------------------------------------------------------------------


def on_processes(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (ranks, folder, options), nprocs=ranks)
        return json.loads(Path(folder, "found.json").read_text())


def spread(values: list[float], digits: int) -> tuple[str, str]:
    """The median, and the quartiles."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}", ""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f}", f"{low:.{digits}f} - {high:.{digits}f}"


def add_rows(table: Table, what: str, ranks: int, seconds: dict[str, list[float]], aims: dict[str, float | None],
             unit: float = 1e-3, digits: int = 1) -> None:  # fmt: skip
    """A row for each system. ``unit``: seconds of what the times are told in."""
    ours = seconds["autopar"]
    for name, theirs in seconds.items():
        row = [what, str(ranks), name, *spread([t / unit for t in theirs], digits)]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        table.add_row(*row, *(("", "", "") if theirs is ours else (*spread(ratios, 2), told(statistics.median(ratios), aims.get(name)))))
    table.add_section()


def told(ratio: float, aim: float | None) -> str:
    return "" if aim is None else f"<= {aim:.2f} {'met' if round(ratio, 2) <= aim else 'missed'}"


def run(options: argparse.Namespace) -> str:
    import transformers

    table = Table()
    for column in ("", "ranks", "system", "median", "quartiles", "ours/theirs", "quartiles", "aim"):
        table.add_column(column, justify="left" if column in ("", "system", "aim") else "right")
    shown = ""
    for ranks in options.ranks:
        for family, found in on_processes(ranks, options).items():
            if "shown" in found:
                shown += f"\nautopar, {family}, {ranks} ranks, rank 0, {options.rounds} steps\n{found['shown']}"
                continue
            what = family if ranks == 1 else f"{family} parallel"
            add_rows(table, f"{what}, ms", ranks, found["seconds"], found["aims"])
            if family == ONE:
                held = {name: [count] for name, count in found["bytes"].items()}
                add_rows(table, "peak memory, MB", ranks, held, found["aims"], 1e6)
                add_rows(table, f"tiny tensors, us a node of {found['nodes']}", ranks, found["tiny"], {}, found["nodes"] * 1e-6, 2)
    if shown:
        return shown
    out = io.StringIO()
    Console(file=out, width=140).print(table)
    return f"transformers {transformers.__version__}; {options.rounds} rounds of {options.steps} steps; float32\n{out.getvalue()}"
