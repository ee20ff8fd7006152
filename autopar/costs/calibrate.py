"""Measure how long collectives take on this machine, and write a machine description with the fitted costs.

It measures gloo processes with one thread each. In each round, the operations take turns at each size. The time of a
call is that of its slowest rank; for a message, it is half a round trip. The time of a size is the lower decile over
all calls, because other programs on the machine can only make them slower. Bytes are counted as in
``autopar.costs.prices``: the whole operand or result on one rank. The smallest size is one number a rank.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as multiprocessing
from rich.console import Console
from rich.table import Table
from torch import distributed

from autopar.costs import machine
from autopar.costs.machine import Link, Machine, Measured

SIZES = (4, 256, 4 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20, 16 << 20)
OWN_MEMORY = (4 << 10, 64 << 20)  # bytes of two copies: the small one measures an op's overhead, the large one its rate
MATRIX = 768

PROFILES_ITSELF = True


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="a machine description, for autopar.costs.machine.Machine.load"
    )
    parser.add_argument("--device", default="cpu", help="the name of the written machine")


# -- in a process ------------------------------------------------------------------------------------------------------


def calls(size: int, rank: int, ranks: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return for each operation its bytes, about ``size``, and a function that calls it."""
    numbers = -(-size // (4 * ranks)) * ranks
    whole, piece, other = torch.ones(numbers), torch.ones(numbers // ranks), torch.empty(numbers)
    message = torch.ones(max(size // 4, 1))
    # older versions of torch have the second name only
    scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor

    def ping() -> None:
        for sender, receiver in ((0, 1), (1, 0)):
            if rank == sender:
                distributed.send(message, receiver)
            elif rank == receiver:
                distributed.recv(message, sender)

    return {
        "all_reduce": (4 * numbers, lambda: distributed.all_reduce(whole.fill_(1))),
        "all_gather": (4 * numbers, lambda: gather(other, piece)),
        "reduce_scatter": (4 * numbers, lambda: scatter(piece, whole)),
        "all_to_all": (4 * numbers, lambda: distributed.all_to_all_single(other, whole)),
        "send": (4 * message.numel(), ping),
    }


def seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of each call."""
    times = [time.perf_counter()]
    for _ in range(repeats):
        call()
        times.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(times)]


def usual(times: list[float]) -> float:
    return statistics.quantiles(times, n=10, method="inclusive")[0]


def work(rank: int, ranks: int, folder: str, rounds: int, sizes: Sequence[int]) -> None:
    """Measure in one of the processes. The first one writes the measurements to ``folder``."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    seconds_of: dict[str, dict[int, list[float]]] = {}
    for size in sizes:
        ready = calls(size, rank, ranks)
        repeats = 20 if size < 1 << 20 else 5 if size < 8 << 20 else 2
        for round in range(rounds + 1):
            for name, (bytes, call) in ready.items():
                distributed.barrier()
                taken = torch.tensor(seconds(call, repeats), dtype=torch.float64)
                distributed.all_reduce(taken, distributed.ReduceOp.MAX)
                if round:  # the first round warms up
                    seconds_of.setdefault(name, {}).setdefault(bytes, []).extend(
                        (taken / (2 if name == "send" else 1)).tolist()
                    )
    copy_seconds = []
    for source in map(torch.ones, (bytes // 4 for bytes in OWN_MEMORY)):
        copy = torch.zeros_like(source)
        copy_seconds.append(usual(seconds(partial(copy.copy_, source), rounds)))
    square = torch.ones(MATRIX, MATRIX)
    product = usual(seconds(lambda: square @ square, rounds))
    if rank == 0:
        times = {name: [(bytes, usual(all)) for bytes, all in rows.items()] for name, rows in seconds_of.items()}
        Path(folder, "found.json").write_text(json.dumps({"times": times, "own": copy_seconds, "product": product}))
    distributed.barrier()
    distributed.destroy_process_group()


# -- fits --------------------------------------------------------------------------------------------------------------


def fitted(operation: str, ranks: int, times: list[tuple[int, float]]) -> Measured:
    """Fit a floor to the small sizes and a line to the large ones, for the split of the sizes that fits best.

    The floor is the median of the times of small sizes; the line is a least-squares fit to those of large sizes. The
    error is the sum of absolute logarithms of ratios, so that one disturbed size does not decide the split.
    """
    bytes, taken = np.array(times, dtype=float).T
    best: tuple[float, Measured] | None = None
    for small in range(len(times) - 1):
        n, t = bytes[small:], taken[small:]
        (fixed, slope), *_ = np.linalg.lstsq(np.stack([1 / t, n / t], axis=1), np.ones_like(t), rcond=None)
        if fixed < 0 or slope <= 0:  # disturbed times may fall with the size, but prices never do
            fixed, slope = 0.0, float(np.sum(n / t) / np.sum((n / t) ** 2))
        floor = float(np.median(taken[:small])) if small else float(fixed)
        latency = min(float(fixed), floor)  # the times determine only latency + half/bandwidth
        fit = Measured(operation, ranks, floor, latency, float(1 / slope), float((fixed - latency) / slope))
        error = float(np.sum(np.abs(np.log(fit.seconds(bytes) / taken))))
        if best is None or error < best[0]:
            best = error, fit
    assert best is not None, "there are two sizes"
    return best[1]


def described(name: str, ranks: int, fits: list[Measured], own: list[float], product: float) -> Machine:
    """Return a machine with the measured figures. Links between nodes are not measured: those of ``cpu`` are taken."""
    like = machine.machine("cpu")
    message = next(fit for fit in fits if fit.operation == "send")
    rate = 2 * OWN_MEMORY[1] / own[1]  # read and written
    return Machine(
        name, like.kind, like.ranks_per_node, Link(max(message.floor, message.latency), message.bandwidth),
        like.outside, Link(own[0], rate), peak=(("f32", 2 * MATRIX**3 / product),), measured=tuple(fits),
        source=f"profiling/run.py calibrate --ranks "
                                                                               f"{ranks}, torch {torch.__version__}",
        note="outside is not measured",
    )  # fmt: skip


def run(options: argparse.Namespace) -> str:
    if options.ranks < 2:
        raise SystemExit("--ranks: one rank exchanges nothing; give 2 or more")
    if options.rounds < 2 or len(set(options.sizes)) < 2:
        raise SystemExit("--rounds, --sizes: a fit needs two of each, or more")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (options.ranks, folder, options.rounds, options.sizes), nprocs=options.ranks)
        measured = json.loads(Path(folder, "found.json").read_text())
    times: dict[str, list[tuple[int, float]]] = measured["times"]
    fits = [fitted(operation, options.ranks, rows) for operation, rows in times.items()]
    this = described(options.device, options.ranks, fits, measured["own"], measured["product"])
    if options.write:
        this.save(options.write)
        assert Machine.load(options.write) == this
    table = Table()
    table.add_column("bytes, about", justify="right")
    for operation in times:
        table.add_column(f"{operation}\nus, fit, ratio", justify="right")
    for k, size in enumerate(options.sizes):
        cells = []
        for fit in fits:
            bytes, taken = times[fit.operation][k]
            cells.append(f"{taken * 1e6:.0f} {fit.seconds(bytes) * 1e6:.0f} {fit.seconds(bytes) / taken:.2f}")
        table.add_row(f"{size:,}", *cells)
    table.add_section()
    for what, say in (
        ("floor, us", lambda fit: f"{fit.floor * 1e6:.0f}"),
        ("latency, us", lambda fit: f"{fit.latency * 1e6:.0f}"),
        ("GB/s", lambda fit: f"{fit.bandwidth / 1e9:.2f}"),
        ("half, bytes", lambda fit: f"{fit.half:,.0f}"),
    ):
        table.add_row(what, *map(say, fits))
    out = io.StringIO()
    Console(file=out, width=140).print(table)
    return (
        f"{options.ranks} gloo processes, {options.rounds} rounds; fit: max(floor, latency + (n + half) / "
        f"bandwidth)\n{out.getvalue()}a local op {measured['own'][0] * 1e6:.0f} us, memory "
        f"{this.memory.bandwidth / 1e9:.1f} GB/s, f32 {this.peak[0][1] / 1e9:.0f} GFLOP/s, one thread; "
        f"{time.perf_counter() - start:.0f} s\n"
    )
