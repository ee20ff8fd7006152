"""The loop: one for the model on a mesh, for the simulated one and for the single device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Step:
    """What one step gave: its number from 0, the loss before the update, and the seconds it took."""

    number: int
    loss: float
    seconds: float


def train(
    call: Callable[..., Any],
    parameters: Iterable[torch.nn.Parameter],
    batches: Iterable[Mapping[str, torch.Tensor]],
    lr: float,
) -> Iterator[Step]:
    """Train with AdamW, a step for each batch. ``call`` takes a batch as keywords; what it returns has a ``.loss``."""
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    for number, batch in enumerate(batches):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = call(**batch).loss
        loss.backward()
        optimizer.step()
        value = loss.item()
        yield Step(number, value, time.perf_counter() - start)
