"""Define a small ResNet with batch norm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def conv(i: int, o: int, *more: Any, **options: Any) -> nn.Conv2d:
    """No bias: before batch norm its gradient is zero but for rounding."""
    return nn.Conv2d(i, o, 3, *more, padding=1, bias=False, **options)


class Residual(nn.Module):
    """Two convolutions with batch norm, and a way around them."""

    def __init__(self, i: int, o: int, stride: int = 1) -> None:
        super().__init__()
        self.conv, self.norm = conv(i, o, stride), nn.BatchNorm2d(o)
        self.row, self.norm2 = conv(o, o), nn.BatchNorm2d(o)
        self.around = (
            nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))
            if (i, stride) != (o, 1)
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.row(self.norm(self.conv(x)).relu_()))
        return F.relu(y + self.around(x), inplace=True)


class Net(nn.Module):
    """A small ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        self.body = Residual(4, 8, 2)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.body(self.stem(x))).flatten(1))
