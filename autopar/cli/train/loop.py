"""The loop: one for the model on a mesh, for the simulated one and for the single device."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LRScheduler

Batch = Mapping[str, torch.Tensor]
Taken = tuple[torch.Tensor, torch.Tensor, bool]  # the loss, the norm of its gradients, whether they overflowed and nothing was changed


@dataclass(frozen=True)
class TrainedStep:
    """What one step gave: its number from 0, the loss before the update, the norm of its gradients, and the seconds it took.

    The norm is there because AdamW does the same with gradients that are all too large by one factor: losses alone
    would not show it.

    Attributes:
        skipped: the gradients overflowed, so that nothing was changed; their norm is not finite.
    """

    number: int
    loss: float
    norm: float
    seconds: float = 0.0
    skipped: bool = False


def train(take: Callable[[Batch], Taken], schedule: LRScheduler, batches: Iterable[Batch], first: int = 0) -> Iterator[TrainedStep]:
    """Train, a step for each batch; the first of them has the number ``first``."""
    for number, batch in enumerate(batches, first):
        start = time.perf_counter()
        loss, norm, skipped = take(batch)
        with warnings.catch_warnings():  # a first step that is skipped is no wrong order of calls
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            schedule.step()
        yield TrainedStep(number, loss.item(), norm.item(), time.perf_counter() - start, skipped)
