"""Run the same training in plain torch, on a single device, to compare its losses with those of the mesh."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from autopar.cli.train.loop import Batch, Taken
from autopar.plan.loss_scaling import LossScaling
from autopar.plan.precision import PrecisionPolicy


@dataclass
class Single:
    """A training step with gradient accumulation over micro-batches, clipping, and the optimizer's update.

    With O1 the forward runs under ``torch.autocast``; with O2 as apex did it: a copy of the model in low precision runs
    forward and backward, its gradients add up in float32, and the optimizer's parameters are the float32 masters of the
    copy. Llama computes its norms and its loss in float32 itself.
    """

    model: nn.Module
    optimizer: Optimizer
    microbatches: int
    clip_norm: float
    policy: PrecisionPolicy | None
    scaling: LossScaling | None
    running: nn.Module = field(init=False)  # the model, or its copy in low precision

    def __post_init__(self) -> None:
        low = self.policy.low if self.policy is not None and self.policy.parameters else None
        self.running = self.model if low is None else copy.deepcopy(self.model).to(low)
        self.device = next(self.model.parameters()).device.type
        s = self.scaling or LossScaling()
        self.scaler = GradScaler(
            self.device, s.initial, s.growth, s.backoff, s.interval, enabled=self.scaling is not None
        )

    def __call__(self, batch: Batch) -> Taken:
        total = torch.zeros((), device=self.device)
        pieces = [value.chunk(self.microbatches) for value in batch.values()]
        for piece in zip(*pieces, strict=True):
            with torch.autocast(
                self.device,
                None if self.policy is None else self.policy.low,
                enabled=self.policy is not None and not self.policy.parameters,
            ):
                loss = self.running(**dict(zip(batch, piece, strict=True))).loss / self.microbatches
            self.scaler.scale(loss).backward()
            total += loss.detach()
            self._to_masters()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self._from_masters()
        return total, norm, self.scaler.get_scale() < before

    def _to_masters(self) -> None:
        if self.running is self.model:
            return
        for master, low in zip(self.model.parameters(), self.running.parameters(), strict=True):
            assert low.grad is not None
            master.grad = low.grad.float() if master.grad is None else master.grad.add_(low.grad)
            low.grad = None

    @torch.no_grad()
    def _from_masters(self) -> None:
        if self.running is not self.model:
            for master, low in zip(self.model.parameters(), self.running.parameters(), strict=True):
                low.copy_(master)
