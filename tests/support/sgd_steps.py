"""Make training steps with SGD, and compare them with a loop of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from presets import preset_of
from steps import Pair
from torch import nn

import autopar
from autopar import Mesh


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def made(
    model: nn.Module | None = None,
    optimizer: Callable[[nn.Module], Any] = sgd,
    mesh: Mesh | None = None,
    **options: Any,
) -> Any:
    mesh = mesh or Mesh(dp=2, tp=2)
    parallel = autopar.parallelize(model or Pair(), mesh, preset_of(mesh.names))
    return parallel.train_step(optimizer(parallel), **options)


def loops_alike(alone: nn.Module, step: Any, data: Any, loss: torch.Tensor) -> None:
    """One step of torch's loop, beside one of ours that was just taken."""
    optimizer = sgd(alone)
    wanted = alone(*data)
    wanted.backward()
    optimizer.step()
    torch.testing.assert_close(loss, wanted.detach())
    for a, b in zip(step.parallel.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b)
