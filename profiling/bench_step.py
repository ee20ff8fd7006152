"""Measure one training step on 1, 2 and 4 processes, beside the systems that people use.

They are eager, DistributedDataParallel, FSDP2, DTensor and a Megatron by hand. A step is forward, backward, AdamW and
zero_grad of a Llama with two layers of 256 and two sequences of 128 tokens a rank, or four micro-batches of as many;
gloo processes with one thread each. Before anything is timed, all systems give the loss and, after a step, the
parameters of the plain model on the whole batch. Rivals take the fastest of AdamW's kernels, found by a race. Each
rival is timed in turn with ours, in rounds: a barrier, one step that does not count, a barrier, some steps; who is
first changes from round to round. A round's time is that of its slowest rank. Times are medians over the rounds, with
quartiles. Ratios are taken within a round: their median, with the interval that holds it with 95 % (of the sign test:
order statistics, whatever the distribution). A figure is met if the whole interval is below what must be, and missed if
the whole is above. Floors are what no system does without: a rank's own work, and the all-reduce of the gradients;
without overlap a step takes their sum. Megatron by hand is there with whole embedding and head on each rank, and with
the vocabulary cut as Megatron and our plan cut it. Under a tool, only autopar's steps run, and rank 0's are shown.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import gc
import io
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from profilers import positive
from rich.console import Console
from rich.table import Table
from step_rivals import FAMILIES, MICROBATCHES, OURS, Numbers, System, batch, llama, loops, one_process
from torch import distributed, nn

import autopar
from autopar.examples.peak import peak_bytes
from autopar.runtime.running.rank import RankRun
from autopar.step.captures import StepCaptures
from autopar.step.run import StepRunner
from autopar.step.states.optimizer_state import OptimizerState
from autopar.step.train_step import TrainStep

LINES = [
    TrainStep.__call__,
    StepCaptures.compiled,
    StepRunner.__call__,
    OptimizerState.trained,
    OptimizerState.finish,
    RankRun.run_part,
]
SAME = 1e-5  # the loss, and all gradients, relatively
CHANGED = 1e-3  # of all parameters, relatively: the first is the sign of a gradient, also of one that is all rounding
RACE = 5  # rounds in which the kernels of AdamW are compared
TINY = 300  # ops forward
NODE = 1.1  # a node on tiny tensors must not take more, relative to eager
PEAK = 1.05  # nor the memory of one process
SURE = 0.95  # the probability that an interval holds the median
ONE = "one process"
DDP = "DistributedDataParallel"

PROFILES_ITSELF = True


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=positive, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--family", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), help="on more than one process"
    )
    parser.add_argument(
        "--rivals", nargs="+", default=[""], metavar="WORD", help="time those with a word in their name"
    )
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--steps", type=positive, default=3, help="timed, of each system in each round")


@dataclass(frozen=True)
class Row:
    """A system's times: seconds in each round. Those of ours have none beside."""

    name: str
    seconds: list[float]
    ours: list[float] | None = None  # of ours beside it, in the same rounds
    aim: float | None = None


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


def check(system: System, begin: dict[str, torch.Tensor], right: Numbers) -> None:
    """Refuses a system whose first step is not that of the plain model on the whole batch."""
    found = system.numbers()
    assert found.parameters.keys() == found.means.keys() == begin.keys(), system.name
    changes = [{name: one.parameters[name] - begin[name] for name in begin} for one in (found, right)]
    for what, error, most in (
        ("loss", abs(found.loss - right.loss) / right.loss, SAME), ("gradients", apart(found.means, right.means), SAME),
        ("changes", apart(*changes), CHANGED),
    ):  # fmt: skip
        if not error <= most:
            raise AssertionError(f"{system.title}: {what} differ by {error:.1e}, relatively")


def apart(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of all, relatively."""
    difference, norm = (torch.stack([tensor.double().norm() for tensor in some]).norm()
                        for some in ([found[name] - right[name] for name in right], right.values()))  # fmt: skip
    return float(difference / norm)


def fastest(systems: list[System]) -> dict[str, System]:
    """Of each name, the system with the fastest kernel; on all ranks the same."""
    kernels: dict[str, dict[str, System]] = {}
    for system in systems:
        kernels.setdefault(system.name, {})[system.kernel] = system
    found = {}
    for name, some in kernels.items():
        times = (
            in_rounds({kernel: system.step for kernel, system in some.items()}, RACE, 1)
            if len(some) > 1
            else {kernel: [0.0] for kernel in some}
        )
        found[name] = some[min(times, key=lambda kernel: statistics.median(times[kernel]))]
    return found


def timed(chosen: dict[str, System], rivals: Sequence[str], rounds: int, steps: int) -> list[Row]:
    """Time each rival in turn with ours."""
    rows, own = [], dict[str, list[float]]()
    for name in rivals:
        system = chosen[name]
        if system.beside:
            pair = {system.beside: chosen[system.beside].step, name: system.step}
            times = in_rounds(pair, rounds, steps)
            own.setdefault(system.beside, times[system.beside])
            rows.append(Row(system.title, times[name], times[system.beside], system.aim))
    return [Row(name, seconds) for name, seconds in own.items()] + rows


def profiled(tool: str, call: Callable[[], Any], steps: int) -> str:
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
    own = set()
    for entry in profile.getstats():  # not by pstats: to it all ATen ops are one function, and it keeps the last
        name = label(entry.code)
        row = rows.setdefault(name, [0, 0, 0])
        for k, value in enumerate(
            (entry.callcount / steps, entry.inlinetime / steps * 1e3, entry.totaltime / steps * 1e3)
        ):
            row[k] += value
        if not isinstance(entry.code, str) and (
            "autopar" in Path(entry.code.co_filename).parts or entry.code.co_filename.startswith("<")
        ):
            own.add(name)
    return (
        listed("of a step, by own time", sorted(rows.items(), key=lambda row: -row[1][1])[:25])
        + "\n"
        + listed(
            "of a step, of autopar's functions by time",
            sorted(((n, row) for n, row in rows.items() if n in own), key=lambda row: -row[1][2])[:40],
        )
    )


def listed(title: str, rows: list[tuple[str, list[float]]]) -> str:
    head = f"{'calls':>10}{'own ms':>10}{'ms':>10}  {title}\n"
    return head + "".join(f"{calls:10.0f}{own:10.2f}{total:10.2f}  {name}\n" for name, (calls, own, total) in rows)


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
    return in_rounds({OURS: lambda: step(parallel), "eager": lambda: step(eager)}, options.rounds, 10), nodes


def work(rank: int, ranks: int, folder: str, options: argparse.Namespace) -> None:
    """What one process does. The first one writes its findings into ``folder``."""
    torch.set_num_threads(1)
    if ranks > 1:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found: dict[str, Any] = {}
    model = llama()
    begin = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for family in options.family if ranks > 1 else [ONE]:
        title, make = FAMILIES.get(family, (ONE, one_process))
        systems = make(model)
        shared = {"data": ranks, "microbatches": ranks * MICROBATCHES}.get(family, 1)
        plain, *_ = loops("plain", lambda: copy.deepcopy(model), batch(shared))
        expected = plain.numbers()
        for system in systems:
            if not system.alone:
                check(system, begin, expected)
        if options.tool != "time":
            found[title] = {"shown": profiled(options.tool, systems[0].step, options.rounds)}
            continue
        chosen = fastest(systems)
        del systems
        steps = max(1, options.steps // MICROBATCHES) if family == "microbatches" else options.steps
        rivals = [name for name in chosen if any(word in name for word in options.rivals)]
        rows = timed(chosen, rivals, options.rounds, steps)
        found[title] = {"rows": [asdict(row) for row in rows]}
        if family == ONE:
            held = {name: [float(peak_bytes(system.step))] for name, system in chosen.items()}
            found[title]["bytes"] = [
                asdict(Row(system.title, held[name], held.get(system.beside), PEAK if system.beside else None))
                for name, system in chosen.items()
            ]
            times, found[title]["nodes"] = tiny(options)
            found[title]["tiny"] = [
                asdict(Row(OURS, times[OURS])), asdict(Row("eager", times["eager"], times[OURS], NODE)),
            ]  # fmt: skip
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


def add_rows(table: Table, what: str, ranks: int, rows: list[Row], unit: float = 1e-3, digits: int = 1) -> None:
    """A row for each system. ``unit``: seconds of what the times are told in."""
    ddp = next((row.seconds for row in rows if row.name.startswith(DDP)), None)
    for row in rows:
        cells = [what, str(ranks), row.name, *spread([t / unit for t in row.seconds], digits)]
        cells.append("" if ddp is None else f"{statistics.median(row.seconds) / statistics.median(ddp):.2f}")
        if row.ours is not None:
            found = ratios(row.ours, row.seconds)
            low, high = interval(found)
            cells += [f"{statistics.median(found):.3f}", f"{low:.3f} - {high:.3f}" if len(found) > 1 else ""]
            cells += told(low, high, row.aim)
        table.add_row(*cells)
    table.add_section()


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def interval(values: list[float]) -> tuple[float, float]:
    """Return the ends of the narrowest interval of order statistics that holds the median with ``SURE``.

    The k smallest and the k largest values are left out where a fair coin shows at most k heads of n with less than
    half of the rest: the inversion of the sign test. Fewer than six values bound nothing, but one is a count.
    """
    ordered, n = sorted(values), len(values)
    if n > 1 and 1 / 2**n > (1 - SURE) / 2:
        return -math.inf, math.inf
    left_out, below = 0, 1 / 2**n  # the probability of at most ``left_out`` heads
    while left_out < n // 2 and below + math.comb(n, left_out + 1) / 2**n <= (1 - SURE) / 2:
        left_out += 1
        below += math.comb(n, left_out) / 2**n
    return ordered[left_out], ordered[n - 1 - left_out]


def told(low: float, high: float, aim: float | None) -> tuple[str, str]:
    """Return what must be, and whether it is."""
    if aim is None:
        return "", ""
    return f"<= {aim:.2f}", "met" if high <= aim else "missed" if low > aim else "open"


def run(options: argparse.Namespace) -> str:
    import transformers

    table = Table()
    for column in ("", "ranks", "system", "median", "quartiles", "/ DDP", "ours / it", "95 %", "must", ""):
        table.add_column(column, justify="left" if column in ("", "system", "must") else "right")
    shown = ""
    for ranks in options.ranks:
        for what, found in on_processes(ranks, options).items():
            if "shown" in found:
                shown += f"\nautopar, {what}, {ranks} ranks, rank 0, {options.rounds} steps\n{found['shown']}"
                continue
            nodes = found.get("nodes", 0)
            for key, title, unit, digits in (
                ("rows", "ms", 1e-3, 1),
                ("bytes", "peak memory, MB", 1e6, 1),
                ("tiny", f"us a node of {nodes}, tiny", nodes * 1e-6, 2),
            ):
                if key in found:
                    add_rows(
                        table,
                        f"{what}, ms" if key == "rows" else title,
                        ranks,
                        [Row(**row) for row in found[key]],
                        unit,
                        digits,
                    )
    if shown:
        return shown
    out = io.StringIO()
    Console(file=out, width=170).print(table)
    return (
        f"transformers {transformers.__version__}; {options.rounds} rounds of {options.steps} steps; float32; "
        f"AdamW in the fastest of its kernels\n{out.getvalue()}"
    )
