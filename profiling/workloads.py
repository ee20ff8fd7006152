"""What the benchmarks run on."""

from __future__ import annotations

import torch
from torch import nn

from autopar import Mesh

MESH = Mesh(dp=2, tp=2)
PLAN = {"*.up.weight": ("tp", None), "*.up.bias": ("tp",), "*.down.weight": (None, "tp")}


class Layer(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def mlp(layers: int) -> tuple[nn.Module, torch.Tensor]:
    """A residual MLP on the meta device: no memory, no arithmetic."""
    with torch.device("meta"):
        return nn.Sequential(*(Layer(512, 2048) for _ in range(layers))), torch.empty(8, 16, 512)
