"""Make small models with pages: a call, a step, stages."""

from __future__ import annotations

import re
from typing import Any

import torch

import autopar


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Tower(torch.nn.Module):
    """Equal blocks, and a mean of squares as the loss."""

    def __init__(self, depth: int = 4, width: int = 16) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(*(Block(width) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


PLAN = {"*.up.weight": ("tp", None), "*.down.weight": (None, "tp")}
MESH = autopar.Mesh(dp=2, tp=2)
X = torch.randn(8, 16)


def call(plan: Any = PLAN, **options: Any) -> autopar.Parallel:
    return autopar.parallelize(Tower(), MESH, plan, example=(X,), **options)


def step(mesh: autopar.Mesh = MESH, **options: Any) -> Any:
    parallel = autopar.parallelize(Tower(), mesh, PLAN if "tp" in mesh.names else None)
    made = parallel.train_step(torch.optim.AdamW(parallel.parameters()), **options)
    made.capture(X)
    return made


def script(text: str, name: str) -> str:
    """Return the JSON of a script element of a page."""
    found = re.findall(rf'<script type="application/json" id="{name}">(.*?)</script>', text, re.DOTALL)
    assert len(found) == 1
    return found[0]
