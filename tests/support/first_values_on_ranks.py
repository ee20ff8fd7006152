"""A model that draws beside torch on two ranks, whose first values are kept."""

from __future__ import annotations

import random

import torch
from error_texts import refused
from torch import distributed, nn

import autopar


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rng = nn.Linear(4, 4).double(), random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.rng.random()).square().sum()


def alike(plan: str) -> None:
    """The value of the first call is that of one device, in the second call too."""
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(4, 4, dtype=torch.float64)
    expected = model(x)
    model.rng.seed(0)
    parallel = autopar.parallelize(model, autopar.Mesh(dp=2), plan, first_values="keep")
    for _ in range(2):
        torch.testing.assert_close(parallel(x), expected)


def different(plan: str) -> str:
    """Each rank has a seed of its own."""
    torch.manual_seed(0)
    model = Scaled()
    model.rng.seed(distributed.get_rank())
    parallel = autopar.parallelize(model, autopar.Mesh(dp=2), plan, first_values="keep")
    return refused(RuntimeError, lambda: parallel(torch.ones(4, 4, dtype=torch.float64)))
