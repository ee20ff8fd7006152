"""Optimizers of torch with their options, and their steps taken by autopar's ops, for tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from autopar.optimizers import definition_of

OPTIMIZERS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (AdamW, {"lr": 1e-2}),
    (AdamW, {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3, "maximize": True}),
    (AdamW, {"lr": 1e-2, "amsgrad": True}),
    (AdamW, {"lr": 1e-2, "weight_decay": 0.0}),
    (Adam, {"lr": 1e-2}),
    (Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    (Adam, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True, "maximize": True, "betas": (0.0, 0.9)}),
    (Adam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (SGD, {"lr": 1e-2}),
    (SGD, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    (SGD, {"lr": 1e-2, "momentum": 0.9}),
    (SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (SGD, {"lr": 1e-2, "momentum": 0.9, "maximize": True}),
    (SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (SGD, {"lr": 1e-2, "momentum": 0.5, "dampening": 1.0, "maximize": True}),
    (Adagrad, {"lr": 1e-1}),
    (Adagrad, {"lr": 1e-1, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-6}),
    (Adagrad, {"lr": 1e-1, "initial_accumulator_value": 0.5, "maximize": True}),
]
NAMES = [
    f"{kind.__name__} {' '.join(f'{name}={value}' for name, value in options.items() if name != 'lr')}".strip()
    for kind, options in OPTIMIZERS
]

SHAPES = [(3, 4), (5,), (), (2, 1, 3), (0, 3)]


def drawn(shapes: Iterable[Sequence[int]], seed: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


class Stepped:
    """An optimizer's parameters and states, updated by the definition of its class."""

    def __init__(self, optimizer: Optimizer, through: Callable[..., Any] | None = None) -> None:
        self.optimizer, self.definition, self.through = optimizer, definition_of(optimizer), through
        given = [(param, group) for group in optimizer.param_groups for param in group["params"]]
        self.params = [param.detach().clone() for param, _ in given]
        self.groups = [group for _, group in given]
        self.states = [
            self.definition.initial(param, group, copy.deepcopy(optimizer.state.get(param, {})))
            for param, group in given
        ]

    def step(
        self,
        grads: Sequence[torch.Tensor],
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        for k, (grad, group) in enumerate(zip(grads, self.groups, strict=True)):
            lr = torch.as_tensor(group["lr"], dtype=torch.float64)
            update = self.definition.update(group)
            self.params[k], self.states[k] = update(self.params[k], grad, self.states[k], lr, grad_scale, found_inf)


def take_step(optimizer: Optimizer, grads: Sequence[torch.Tensor]) -> None:
    """torch's own step."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer.step()
