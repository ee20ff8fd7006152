"""On a rank: what a pipelined step allocates, and what its pool holds, by the number of micro-batches."""

from __future__ import annotations

import gc

import torch
from torch import distributed, nn

import autopar
from autopar import Mesh
from autopar.examples.peak import peak_bytes

ROWS, WIDE, LAYERS = 64, 16, 8
BOUNDARY = ROWS * WIDE * 4  # bytes


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU()) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, y)


def used(policy: str, counts: list[int]) -> list[tuple[int, int, int]]:
    """For each number of micro-batches: bytes that the first step allocates, bytes that are predicted, and buffers for
    received messages."""
    found, rank = [], distributed.get_rank()
    for count in counts:
        parallel = autopar.parallelize(Blocks(), Mesh(pp=2), {})
        step = parallel.train_step(torch.optim.SGD(parallel.parameters(), 0.1), microbatches=count, schedule=policy)
        given = {name: torch.randn(ROWS * count, WIDE) for name in ("x", "y")}
        step.capture(**given)
        predicted = step.memory(rank).made
        gc.collect()
        allocated = peak_bytes(lambda step=step, given=given: step(**given))
        found.append((allocated, predicted, step._here.carrier.messages(rank).pool.made))
        del step, parallel
        gc.collect()
    return found
