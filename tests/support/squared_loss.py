"""A loss of two linear layers, for tests of searched plans."""

from __future__ import annotations

import torch
from torch import nn


class Loss(nn.Module):
    """Takes rows of 64 numbers, and returns the mean of the squared results."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()
