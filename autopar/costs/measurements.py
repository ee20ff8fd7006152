"""Measure how long collectives and ops take on this machine, in processes that all work at the same time.

In each round, the collectives take turns at each size. The time of a call is that of its slowest rank; for a message,
it is half a round trip. The time of a size is the lower decile over all calls, because other programs on the machine
can only make them slower. Bytes are counted as in ``autopar.costs.prices``: the whole operand or result on one rank.
The smallest size is one number a rank.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing
from torch import distributed

from autopar.ir.record import DTYPES

SIZES = (4, 256, 4 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20, 16 << 20)
FIRST, LONG = 4, 0.2  # a product of matrices that takes longer than so many seconds is measured so often only


@dataclass(frozen=True)
class Operands:
    """What ops are measured on, for one type of device.

    Attributes:
        copies: bytes of two copies: the small one measures an op's overhead, the large one the memory's rate.
        matrix: rows and columns of the matrices that are multiplied.
        dtypes: of the matrices.
    """

    copies: tuple[int, int]
    matrix: int
    dtypes: tuple[str, ...]


OPERANDS = {
    "cpu": Operands((4 << 10, 64 << 20), 512, ("f64", "f32", "bf16")),
    "cuda": Operands((4 << 10, 1 << 30), 8192, ("f64", "f32", "bf16", "f16")),
}


@dataclass(frozen=True)
class Measurements:
    """What was measured. Times are in seconds.

    Attributes:
        backend, device: of the processes: ``gloo``, ``cpu``.
        ranks, rounds, threads: the processes, how often each was measured, and the threads of a process.
        times: collective → (bytes, time) pairs, in the order of the sizes.
        copies: the times of the two copies of ``Operands``.
        flops: dtype → floating point operations a second of a product of matrices.
        seconds: how long it took.
    """

    backend: str
    device: str
    ranks: int
    rounds: int
    threads: int
    times: dict[str, list[tuple[int, float]]]
    copies: list[float]
    flops: dict[str, float]
    seconds: float


def in_processes(ranks: int, rounds: int, sizes: Sequence[int], device: str = "cpu") -> Measurements:
    """Start so many processes, with one thread each, and measure in them."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_work, (ranks, folder, rounds, tuple(sizes), device), nprocs=ranks)
        return Measurements(**json.loads(Path(folder, "found.json").read_text()))


def _work(rank: int, ranks: int, folder: str, rounds: int, sizes: Sequence[int], device: str) -> None:
    """Measure in one of the processes. The first one writes the measurements to ``folder``."""
    torch.set_num_threads(1)
    found = in_group(f"file://{folder}/store", rank, rank, ranks, rounds, sizes, device)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(asdict(found)))


def in_group(
    rendezvous: str, rank: int, local_rank: int, ranks: int, rounds: int, sizes: Sequence[int], device: str = "cpu"
) -> Measurements:
    """Join the other processes, and measure with them. Each returns the same measurements.

    Args:
        rendezvous: where processes meet: ``env://`` under torchrun.
        local_rank: the accelerator of this process.
    """
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    here = torch.device("cpu") if device == "cpu" else torch.device(device, local_rank)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    distributed.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=ranks)
    try:
        with here:
            start = time.perf_counter()
            times = _collectives(rank, ranks, rounds, sizes) if ranks > 1 else {}
            copies, flops = _ops(here, rounds)
        return Measurements(
            backend, device, ranks, rounds, torch.get_num_threads(), times, copies, flops, time.perf_counter() - start
        )
    finally:
        distributed.destroy_process_group()


# -- collectives -------------------------------------------------------------------------------------------------------


def _collectives(rank: int, ranks: int, rounds: int, sizes: Sequence[int]) -> dict[str, list[tuple[int, float]]]:
    taken: dict[str, dict[int, list[float]]] = {}
    for size in sizes:
        ready = _calls(size, rank, ranks)
        repeats = 20 if size < 1 << 20 else 5 if size < 8 << 20 else 2
        for round in range(rounds + 1):
            for name, (bytes, call) in ready.items():
                seconds = _slowest(_seconds(call, repeats))
                if round:  # the first round warms up
                    taken.setdefault(name, {}).setdefault(bytes, []).extend(
                        [each / (2 if name == "send" else 1) for each in seconds]
                    )
    return {name: [(bytes, _usual(all)) for bytes, all in rows.items()] for name, rows in taken.items()}


def _calls(size: int, rank: int, ranks: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return for each operation its bytes, about ``size``, and a function that calls it."""
    numbers = -(-size // (4 * ranks)) * ranks
    whole, piece, other = torch.ones(numbers), torch.ones(numbers // ranks), torch.empty(numbers)
    message = torch.ones(max(size // 4, 1))
    # older versions of torch have the second name only
    scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor

    def ping() -> None:
        """Ranks exchange messages in pairs, all pairs at once; an odd last rank rests."""
        other_rank = rank ^ 1
        if other_rank >= ranks:
            return
        for sends in (rank < other_rank, rank > other_rank):
            if sends:
                distributed.send(message, other_rank)
            else:
                distributed.recv(message, other_rank)

    return {
        "all_reduce": (4 * numbers, lambda: distributed.all_reduce(whole.fill_(1))),
        "all_gather": (4 * numbers, lambda: gather(other, piece)),
        "reduce_scatter": (4 * numbers, lambda: scatter(piece, whole)),
        "all_to_all": (4 * numbers, lambda: distributed.all_to_all_single(other, whole)),
        "send": (4 * message.numel(), ping),
    }


# -- ops ---------------------------------------------------------------------------------------------------------------


def _ops(device: torch.device, rounds: int) -> tuple[list[float], dict[str, float]]:
    """Return the times of copies, and the operations a second of products of matrices."""
    operands = OPERANDS[device.type]
    copies = []
    for source in map(torch.ones, (bytes // 4 for bytes in operands.copies)):
        copy = torch.zeros_like(source)
        copies.append(_usual(_slowest(_seconds(partial(copy.copy_, source), rounds))))
    flops = {}
    for name in operands.dtypes:
        square = torch.ones(operands.matrix, operands.matrix, dtype=DTYPES[name])
        product = partial(torch.mm, square, square)
        times = _slowest(_seconds(product, FIRST))[1:]  # the first one warms up
        if min(times) < LONG:
            times += _slowest(_seconds(product, rounds))
        flops[name] = 2 * operands.matrix**3 / _usual(times)
    return copies, flops


# -- times -------------------------------------------------------------------------------------------------------------


def _seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Begin together with all ranks, and return the seconds of each call."""
    wait = torch.cuda.synchronize if torch.get_default_device().type == "cuda" else None
    distributed.barrier()
    times = [time.perf_counter()]
    for _ in range(repeats):
        call()
        if wait is not None:
            wait()
        times.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(times)]


def _slowest(seconds: list[float]) -> list[float]:
    """Return the seconds of the slowest rank for each call."""
    times = torch.tensor(seconds, dtype=torch.float64)
    distributed.all_reduce(times, distributed.ReduceOp.MAX)
    return times.tolist()


def _usual(times: list[float]) -> float:
    return statistics.quantiles(times, n=10, method="inclusive")[0] if len(times) > 1 else times[0]
