"""A rank under torchrun that takes steps until it is ended: a model of autopar, a user's loop."""

from __future__ import annotations

import os

import torch
from torch import distributed, nn

import autopar


class Model(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    ranks = distributed.get_world_size()
    parallel = autopar.parallelize(Model(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), autopar.Mesh(dp=ranks), "ddp")
    step, x = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=1e-3)), torch.randn(4 * ranks, 8)
    for k in range(10**9):
        step(x)
        if k == 0:
            os.write(1, f"rank {distributed.get_rank()} has the pid {os.getpid()}\n".encode())  # at once, as one line
