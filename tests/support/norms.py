"""Steps whose optimizer has a part of the model, beside a single device that clips as people do. On each rank, or
simulated."""

from __future__ import annotations

import copy
from typing import Any

import loops
import torch
from equality import relative
from steps import run
from torch import nn

import autopar
from autopar import Mesh

CLIP = 0.3
PLAN = {"*.body.weight": ("tp", None), "*.head.weight": (None, "tp")}


class Head(nn.Module):
    """What a head reads is also a parameter that nobody trains, tied to another."""

    def __init__(self, steepness: float = 1.0) -> None:
        super().__init__()
        self.steepness = steepness
        self.body, self.head, self.tied, self.frozen = (
            nn.Linear(6, 8),
            nn.Linear(8, 6),
            nn.Linear(6, 8, bias=False),
            nn.Linear(6, 6),
        )
        self.tied.weight = self.body.weight
        self.steep = nn.Parameter(torch.zeros(8))
        self.frozen.requires_grad_(False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (
            torch.tanh(self.body(self.frozen(x))) + self.tied(x) + (self.steep - self.steep.detach()) * self.steepness
        )
        return (self.head(hidden) * 3).square().mean()


def head_alone(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)


def clipped_alike(sizes: dict[str, int], options: dict[str, Any], clip_parameters: str | None) -> None:
    torch.manual_seed(0)
    model = Head()
    alone = copy.deepcopy(model)
    said = {} if clip_parameters is None else {"clip_parameters": clip_parameters}
    parallel = autopar.parallelize(model, Mesh(sizes), PLAN if "tp" in sizes else "ddp")
    step, optimizer = parallel.train_step(head_alone(parallel), clip_norm=CLIP, **said, **options), head_alone(alone)
    norms = []
    for k in range(4):
        x = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        loss = alone(x)
        alone.zero_grad()
        loss.backward()
        clipped = alone.head.parameters() if clip_parameters == "optimizer" else alone.parameters()
        norms.append(nn.utils.clip_grad_norm_(clipped, CLIP))
        optimizer.step()
        assert relative(run(step, x, promoted=False), loss.detach()) <= 1e-12
        assert relative(step.grad_norm, norms[-1]) <= 1e-12, (k, step.grad_norm, norms[-1])
    assert min(norms) > CLIP
    for (name, a), b in zip(parallel.named_parameters(), alone.parameters(), strict=True):
        assert relative(loops.whole(a), b) <= 1e-12, name
