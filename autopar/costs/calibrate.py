"""Fit costs to measured times, and describe the machine by them; print both as a table."""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from autopar.costs import machine
from autopar.costs.machine import Link, Machine, Measured
from autopar.costs.measurements import OPERANDS, SIZES, Measurements, in_processes

PROFILES_ITSELF = True

OUTSIDE = "outside is not measured"  # notes of calibrated machines
NEITHER = "inside and outside are not measured"


def fitted(operation: str, ranks: int, times: Sequence[tuple[int, float]]) -> Measured:
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


@dataclass(frozen=True)
class Calibration:
    """A machine, and the measurements that its figures are fitted to. Prints as tables."""

    machine: Machine
    measurements: Measurements

    def __str__(self) -> str:
        found, out = self.measurements, io.StringIO()
        if found.times:
            Console(file=out, width=140).print(self._of_collectives())
        line = "; fit: max(floor, latency + (n + half) / bandwidth)" * bool(found.times)
        one = "process" if found.ranks == 1 else "processes"
        rates = ", ".join(f"{name} {flops / 1e9:,.0f} GFLOP/s" for name, flops in found.flops.items())
        threads = "one thread" if found.threads == 1 else f"{found.threads} threads"
        return (
            f"{found.ranks} {found.backend} {one}, {found.rounds} rounds{line}\n{out.getvalue()}"
            f"a local op {found.copies[0] * 1e6:.0f} us, memory {self.machine.memory.bandwidth / 1e9:.1f} GB/s, "
            f"{rates}, {threads}; {found.seconds:.0f} s\n"
        )

    def _of_collectives(self) -> Table:
        """A row for each size: the time, that of the fit, and their ratio; and the figures of the fits."""
        table, times, fits = Table(), self.measurements.times, self.machine.measured
        table.add_column("bytes, about", justify="right")
        for operation in times:
            table.add_column(f"{operation}\nus, fit, ratio", justify="right")
        for rows in zip(*times.values(), strict=True):
            cells = [
                f"{taken * 1e6:.0f} {fit.seconds(bytes) * 1e6:.0f} {fit.seconds(bytes) / taken:.2f}"
                for fit, (bytes, taken) in zip(fits, rows, strict=True)
            ]
            table.add_row(f"{rows[-1][0]:,}", *cells)
        table.add_section()
        table.add_row("floor, us", *(f"{fit.floor * 1e6:.0f}" for fit in fits))
        table.add_row("latency, us", *(f"{fit.latency * 1e6:.0f}" for fit in fits))
        table.add_row("GB/s", *(f"{fit.bandwidth / 1e9:.2f}" for fit in fits))
        table.add_row("half, bytes", *(f"{fit.half:,.0f}" for fit in fits))
        return table


def calibrated(found: Measurements, name: str, source: str) -> Calibration:
    """Return a machine with the measured figures.

    Links between nodes are not measured: those of ``cpu`` are taken, or of ``generic`` for an accelerator. Neither is
    the link inside a node, where one process has measured.
    """
    like = machine.machine("cpu" if found.device == "cpu" else "generic")
    fits = tuple(fitted(operation, found.ranks, rows) for operation, rows in found.times.items())
    inside, note = like.inside, NEITHER
    if fits:
        message = next(fit for fit in fits if fit.operation == "send")
        inside = Link(max(message.floor, message.latency), message.bandwidth)
        note = OUTSIDE
    small, large = found.copies
    rate = 2 * OPERANDS[found.device].copies[1] / large  # read and written
    capacity = None if found.device == "cpu" else float(torch.cuda.get_device_properties(0).total_memory)
    described = Machine(
        name, found.device, like.ranks_per_node, inside, like.outside, Link(small, rate),
        peak=tuple(found.flops.items()), measured=fits, capacity=capacity,
        source=f"{source}, {found.ranks} ranks, torch {torch.__version__}", note=note,
    )  # fmt: skip
    return Calibration(described, found)


def knows_other_nodes(machine: Machine) -> bool:
    """Return whether a machine has figures of the links between nodes; a calibrated one has only round ones."""
    return machine.note not in (OUTSIDE, NEITHER)


# -- as a benchmark ----------------------------------------------------------------------------------------------------


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--write", type=Path, metavar="FILE", help="a machine description, for machine= of parallelize")
    parser.add_argument("--device", default="cpu", help="the name of the written machine")


def run(options: argparse.Namespace) -> str:
    if options.ranks < 2:
        raise SystemExit("--ranks: one rank exchanges nothing; give 2 or more")
    if options.rounds < 2 or len(set(options.sizes)) < 2:
        raise SystemExit("--rounds, --sizes: a fit needs two of each, or more")
    found = calibrated(
        in_processes(options.ranks, options.rounds, options.sizes), options.device, "profiling/run.py calibrate"
    )
    if options.write:
        found.machine.save(options.write)
        assert Machine.load(options.write) == found.machine
    return str(found)
