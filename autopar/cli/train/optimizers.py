"""Offer a few of torch's optimizers, and one of its schedules of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

Parameters = Iterable[torch.nn.Parameter]

OPTIMIZERS: dict[str, Callable[[Parameters, float, float], Optimizer]] = {  # of parameters, learning rate, weight decay
    "adamw": lambda parameters, lr, decay: AdamW(parameters, lr=lr, weight_decay=decay),
    "adam": lambda parameters, lr, decay: Adam(parameters, lr=lr, weight_decay=decay),
    "sgd": lambda parameters, lr, decay: SGD(parameters, lr=lr, weight_decay=decay, momentum=0.9),
}


def factor(step: int, warmup: int, steps: int) -> float:
    """Return the factor of the learning rate at a step, counted from 0; without a warm-up always 1.

    It grows linearly to 1 in ``warmup`` steps; then it is half a cosine that reaches 0 after ``steps``.
    """
    if not warmup:
        return 1.0
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup)))) / 2


def schedule_of(optimizer: Optimizer, warmup: int, steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: factor(step, warmup, steps))
