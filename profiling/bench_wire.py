"""Measure the emulated wire: what it adds to gloo where it is free, and how far operations end from their price."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import distributed

import autopar
from autopar.runtime.wire.clock import now

PROFILES_ITSELF = True  # in other processes
SIZES = (4, 64 << 10, 1 << 20, 8 << 20)  # bytes
Row = tuple[str, int, list[float], list[float]]  # operation, bytes, and the seconds of two kinds


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--latency", type=float, default=1e-3, help="seconds")
    parser.add_argument("--bandwidth", type=float, default=1e8, help="bytes a second")


def operations(size: int, group: Any) -> dict[str, Callable[[], Any]]:
    """One operation of each kind, which returns the work that it starts."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    count = max(1, size // 4 // ranks)
    x, piece = torch.ones(count * ranks), torch.ones(count)

    def send() -> Any:
        if rank > 1:
            return None
        return distributed.isend(x, 1, group=group) if rank == 0 else distributed.irecv(x, 0, group=group)

    def scatter() -> Any:
        return distributed.reduce_scatter_tensor(piece, x, group=group, async_op=True)

    return {
        "all_reduce": lambda: distributed.all_reduce(x, group=group, async_op=True),
        "all_gather": lambda: distributed.all_gather_into_tensor(x, piece, group=group, async_op=True),
        "reduce_scatter": scatter,
        "send": send,
    }


def seconds(start: Callable[[], Any]) -> float:
    distributed.barrier()
    begun = now()
    work = start()
    if work is not None:
        work.wait()
    return now() - begun


def overhead(rounds: int) -> list[Row]:
    """Pairs on gloo and on a wire that is free, one after the other."""
    gloo = distributed.new_group(backend="gloo")
    rows: list[Row] = []
    for size in SIZES:
        plain, wired = operations(size, gloo), operations(size, None)
        for name in plain:
            pairs = [(seconds(plain[name]), seconds(wired[name])) for _ in range(rounds + 3)][3:]
            rows.append((name, size, *([pair[k] for pair in pairs] for k in (0, 1))))
    return rows


def beside_price(rounds: int) -> tuple[list[Row], str]:
    """The seconds from the begin of a transfer until the caller goes on, and its price."""
    wire = autopar.runtime.wire.emulate.present()
    rows: list[Row] = []
    for size in SIZES:
        for name, start in operations(size, None).items():
            measured, price = list[float](), list[float]()
            for _ in range(rounds):
                distributed.barrier()
                wire.reset()
                work = start()
                if work is None:
                    continue
                work.wait()
                ended, record = now(), wire.records[-1]
                measured.append(ended - record.begin)
                price.append(record.end - record.begin)
            if measured:
                rows.append((name, size, price, measured))
    return rows, overlapped(wire, rounds)


def overlapped(wire: Any, rounds: int) -> str:
    """An all-reduce beside computing that takes as long: 2 × a transfer if nothing overlaps, 1 × if all does."""
    x = torch.ones(1 << 18)
    distributed.all_reduce(x)
    length = wire.records[-1].end - wire.records[-1].begin
    wire.reset()
    ratios = list[float]()
    for _ in range(rounds):
        distributed.barrier()
        begun = now()
        work = distributed.all_reduce(x, async_op=True)
        wire.pacer.begin()
        wire.pacer.computed(length)
        work.wait()
        ratios.append((now() - begun) / length)
    return (
        f"an all-reduce of {x.numel() * 4 >> 20} MiB beside paced computing of the same {length * 1e3:.2f} ms: "
        f"{statistics.median(ratios):.3f} × either (1 if all overlaps, 2 if nothing does)\n{wire.report()}"
    )


def _rank(rank: int, ranks: int, store: str, wire: tuple[float, float], what: str, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    autopar.emulate(*wire)
    distributed.init_process_group(init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = {"overhead": overhead, "beside_price": beside_price}[what](rounds)
    if rank == 0:
        results.put(found)
    distributed.barrier()
    distributed.destroy_process_group()


def on_ranks(options: argparse.Namespace, wire: tuple[float, float], what: str) -> Any:
    """Return the result of a function on rank 0 of new processes."""
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = (options.ranks, os.path.join(folder, "store"), wire, what, options.rounds, results)
        processes = multiprocessing.spawn(_rank, given, options.ranks, join=False)
        found = results.get()
        while not processes.join():
            pass
    return found


def table(heads: tuple[str, str, str], rows: list[Row]) -> str:
    lines = [f"{'operation':16}{'bytes':>10}{heads[0]:>12}{heads[1]:>12}{heads[2]:>12}{'90 %':>9}"]
    for name, size, first, second in rows:
        apart = sorted((b - a) * 1e6 for a, b in zip(first, second, strict=True))
        lines.append(
            f"{name:16}{size:10d}{statistics.median(first) * 1e3:12.3f}{statistics.median(second) * 1e3:12.3f}"
            f"{statistics.median(apart):12.0f}{apart[int(0.9 * (len(apart) - 1))]:9.0f}"
        )
    return "\n".join(lines)


def run(options: argparse.Namespace) -> str:
    free = on_ranks(options, (0.0, math.inf), "overhead")
    priced, overlap = on_ranks(options, (options.latency, options.bandwidth), "beside_price")
    return (
        f"{options.ranks} ranks; medians of {options.rounds}; ms, and µs for differences\n\n"
        f"a wire without latency and limit, beside gloo\n{table(('gloo', 'wire', 'added'), free)}\n\n"
        f"a wire of {options.latency * 1e6:g} µs and {options.bandwidth / 1e6:g} MB/s: from the begin of a transfer "
        f"until the caller goes on\n{table(('price', 'measured', 'after'), priced)}\n\n{overlap}\n"
    )
