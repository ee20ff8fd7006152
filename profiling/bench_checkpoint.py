"""Measure what checksums cost a save and a load.

The state has 128 MB; the checksums are CRC-32, and one that reads nothing. Rounds alternate, and each ratio is the
median over rounds of two neighbours.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from unittest import mock

import torch

from autopar import checkpoint
from autopar.checkpoint import files, newest, writing

LINES = [files.verify, writing._write]  # for --tool lines


class NoChecksum:
    """``zlib``, whose CRC-32 is always 0."""

    @staticmethod
    def crc32(data: object, value: int = 0) -> int:
        return 0


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=128)


def run(options: argparse.Namespace) -> str:
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    torch.manual_seed(0)
    state = {f"w{k}": torch.randn(options.megabytes * 10**6 // 4 // 16) for k in range(16)}
    folder = tempfile.mkdtemp()
    times: dict[str, list[float]] = {}

    def measure(name: str) -> None:
        shutil.rmtree(folder)
        times.setdefault(f"save {name}", []).append(seconds(lambda: checkpoint.save(folder, state)))
        times.setdefault(f"load {name}", []).append(seconds(lambda: checkpoint.load(folder, state)))

    for _ in range(options.rounds):
        measure("with CRC-32")
        with mock.patch.object(writing, "zlib", NoChecksum), mock.patch.object(files, "zlib", NoChecksum):
            measure("without")
        with mock.patch.object(newest, "verify", lambda *_: None):
            measure("unverified")
    shutil.rmtree(folder)
    data = bytes(16 * 10**6)
    rate = len(data) / min(seconds(lambda: zlib.crc32(data)) for _ in range(5)) / 1e9

    def ratio(what: str, one: str, other: str) -> str:
        pairs = zip(times[f"{what} {one}"], times[f"{what} {other}"], strict=True)
        return f"{statistics.median(a / b for a, b in pairs):.2f}"

    lines = [
        f"{options.megabytes} MB in 16 tensors, one process, {options.rounds} rounds; CRC-32 of zlib at {rate:.2f} "
        f"GB/s\n",
        f"{'median':28}{'seconds':>10}",
    ]
    lines += [f"{name:28}{statistics.median(values):10.3f}" for name, values in times.items()]
    lines += [
        f"\nsave, with CRC-32 / without                        {ratio('save', 'with CRC-32', 'without')}",
        f"load, with CRC-32 / without                        {ratio('load', 'with CRC-32', 'without')}",
        f"load, files read twice and compared / read once    {ratio('load', 'with CRC-32', 'unverified')}",
    ]
    return "\n".join(lines)
