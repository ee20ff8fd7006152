"""Measure how much slower ops compute while a collective runs.

A product of matrices is timed alone, and beside an all-reduce that takes about twice as long as all the products. On a
GPU both need the same processors, on a CPU the same cores.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median

import torch
from torch import distributed

from autopar.costs.measurements import OPERANDS
from autopar.runtime.measuring.clock import Clock

ROUNDS = 5
FEWEST_BYTES, MOST_BYTES = 1 << 20, 1 << 28  # of the operand of the all-reduce
PRODUCTS = 3  # that are timed beside it, at least


def measure_interference(clock: Clock) -> float:
    """Return how much longer a product of matrices takes beside an all-reduce: 0.5 means 1.5 times as long.

    It is at least 0. All ranks of the job call it, and get the same number.
    """
    size = OPERANDS[clock.device.type].matrix
    square = torch.ones(size, size, device=clock.device)
    product = partial(torch.mm, square, square)
    alone = clock.median(product)
    flat, seconds = _long_reduction(clock, 2 * PRODUCTS * alone)
    count = max(PRODUCTS, int(seconds / 2 / alone))
    factors = [_beside(clock, flat, product, count) / count / alone for _ in range(ROUNDS)]
    return max(0.0, median(factors) - 1)


def _long_reduction(clock: Clock, wanted: float) -> tuple[torch.Tensor, float]:
    """Return the operand of an all-reduce that takes as long as wanted, or the largest one, and its seconds."""
    bytes = FEWEST_BYTES
    while True:
        flat = torch.zeros(bytes // 4, device=clock.device)
        seconds = clock.median(partial(distributed.all_reduce, flat))
        if seconds >= wanted or bytes >= MOST_BYTES:
            return flat, seconds
        bytes = min(MOST_BYTES, max(2 * bytes, int(bytes * wanted / seconds)) // 4 * 4)


def _beside(clock: Clock, flat: torch.Tensor, product: partial[torch.Tensor], count: int) -> float:
    """Return the seconds of so many products while the all-reduce runs, on the slowest rank."""
    distributed.barrier(clock.group)
    work = distributed.all_reduce(flat, async_op=True)
    seconds = sum(Clock(clock.device).each(product, count)) if clock.device.type != "cpu" else _elapsed(product, count)
    work.wait()
    return clock.agreed([seconds])[0]


def _elapsed(product: partial[torch.Tensor], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        product()
    return time.perf_counter() - start
