"""The loop: one for the model on a mesh, for the simulated one and for the single device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


@dataclass(frozen=True)
class Step:
    """What one step gave: its number from 0, the loss before the update, the norm of its gradients, and the seconds it took.

    The norm is there because AdamW does the same with gradients that are all too large by one factor: losses alone
    would not show it.
    """

    number: int
    loss: float
    norm: float
    seconds: float


def train(
    call: Callable[..., Any],
    parameters: Iterable[torch.nn.Parameter],
    batches: Iterable[Mapping[str, torch.Tensor]],
    lr: float,
) -> Iterator[Step]:
    """Train with AdamW, a step for each batch. ``call`` takes a batch as keywords; what it returns has a ``.loss``."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    for number, batch in enumerate(batches):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = call(**batch).loss
        loss.backward()
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        optimizer.step()
        value = loss.item()
        yield Step(number, value, (norm.full_tensor() if isinstance(norm, DTensor) else norm).item(), time.perf_counter() - start)
