"""Define models whose forward reads Python values."""

from __future__ import annotations

import argparse
import types
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

d = torch.float64
FACTOR = 2.0
TABLE = {"a": [1.0, 2.0]}


@dataclass
class Inner:
    scale: float = 1.5


@dataclass
class Config:
    """Options as users keep them."""

    mode: str = "plus"
    inner: Inner = field(default_factory=Inner)
    sizes: list[int] = field(default_factory=lambda: [1, 2])

    @property
    def doubled(self) -> float:
        return self.inner.scale * 2


class Slotted:
    __slots__ = ("shift",)

    def __init__(self) -> None:
        self.shift = 0.5


CONFIG = Config()


def closed_over() -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], None]]:
    power = 1.0

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + (power if power else 3.0)

    def change(value: float) -> None:
        nonlocal power
        power = value

    return function, change


def factor() -> float:
    return FACTOR


class Reader(nn.Module):
    """Reads of everything."""

    offset = 0.25

    def __init__(self) -> None:
        super().__init__()
        self.l, self.drop = nn.Linear(4, 4, dtype=d), nn.Dropout(0.0)
        self.layers = nn.ModuleList([nn.Linear(4, 4, dtype=d) for _ in range(2)])
        self.config, self.slotted = Config(), Slotted()
        self.options, self.names = {"gain": 1.0, "deep": [{"on": True}]}, types.SimpleNamespace(bias=0.5)
        self.args = argparse.Namespace(clip=0.1)
        self.beta, self.flag, self.which, self.kind = 1.0, False, 0, torch.float64
        self.weights = [0.5, 0.25]
        self.plain = torch.tensor(1.5, dtype=d)
        self.act = torch.tanh
        self.closed, self.change = closed_over()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.l(x)) * self.beta * factor() + self.offset + self.args.clip
        y = y + self.config.doubled if self.config.mode == "plus" else y - self.config.inner.scale
        y = y * self.options["gain"] if self.options["deep"][0]["on"] else y
        y = self.layers[self.which](y) * self.weights[0] + self.weights[1] + self.slotted.shift + self.names.bias
        y = -y if self.flag else y
        y = y + getattr(self, "extra", 0) + CONFIG.inner.scale * TABLE["a"][0] + sum(self.config.sizes)
        return self.act(self.closed(y * self.plain)).to(self.kind)


class Weighted(nn.Module):
    """A loss whose second term has a weight."""

    def __init__(self, dtype: torch.dtype = d) -> None:
        super().__init__()
        self.l, self.beta = nn.Linear(4, 4, dtype=dtype), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.l(x)
        return (y * (1 - self.beta)).square().mean() + self.beta * y.mean() + 0.5**2 * (y / (self.beta + 1)).mean()
