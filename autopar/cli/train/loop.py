"""Run the training loop, the same for the model on a mesh, for the simulated model and for the single device."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LRScheduler

Batch = Mapping[str, torch.Tensor]
# the loss, the norm of its gradients, whether they overflowed and the step was skipped
Taken = tuple[torch.Tensor, torch.Tensor, bool]


@dataclass(frozen=True)
class TrainedStep:
    """The result of one step.

    It has its number from 0, the loss before the update, the norm of its gradients, and its time in seconds. The norm
    is there because AdamW does the same with gradients that are all too large by one factor: losses alone would not
    show it.

    Attributes:
        skipped: the gradients overflowed, so that nothing was changed; their norm is not finite.
    """

    number: int
    loss: float
    norm: float
    seconds: float = 0.0
    skipped: bool = False


def train(
    take: Callable[[Batch], Taken], schedule: LRScheduler, batches: Iterable[Batch], first: int = 0
) -> Iterator[TrainedStep]:
    """Train one step for each batch; the first step has the number ``first``."""
    for number, batch in enumerate(batches, first):
        start = time.perf_counter()
        loss, norm, skipped = take(batch)
        with warnings.catch_warnings():  # torch warns of a wrong order of calls if the first step is skipped
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            schedule.step()
        yield TrainedStep(number, loss.item(), norm.item(), time.perf_counter() - start, skipped)
