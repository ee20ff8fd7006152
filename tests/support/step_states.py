"""Make steps whose states tests change, and copy and compare these states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import loops
import torch
from steps import Pair, vectors

import autopar
from autopar import Mesh

Change = Callable[[dict[str, Any]], Any]


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, **{"momentum": 0.9, **options})


def adagrad(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)


def batch(k: int) -> dict[str, torch.Tensor]:
    return {"x": vectors(k)["x"], "y": vectors(k + 9)["x"]}


def made(optimizer: Callable[[Any], Any] = adamw, model: torch.nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    parallel = autopar.parallelize(model or Pair().double(), Mesh(dp=2), "ddp")
    return parallel.train_step(optimizer(parallel), **options)


def everything(step: Any) -> dict[str, Any]:
    """All that a step goes on from, as copies; full tensors."""

    def copied(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copied(one) for key, one in value.items()}
        if isinstance(value, list):
            return [copied(one) for one in value]
        return loops.whole(value).clone() if isinstance(value, torch.Tensor) else value

    return copied(step.state_dict())


def same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def of(state: dict[str, Any], name: str = "up.weight") -> dict[str, Any]:
    return state["optimizer"]["state"][name]
