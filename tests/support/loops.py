"""Training loops that run on each rank of real processes, beside the model's own on a single device."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from casts import PromotedCasts
from conv_net import Net
from equality import loss_of, relative
from models import COLUMN_ROW, Residual
from torch import nn
from transformers_models import bert, gpt2, llama

import autopar
from autopar import Mesh
from autopar.runtime.dtensors import full_tensor, is_dtensor

VOCABULARY = 22


def text(step: int, rows: int = 4, length: int = 6) -> dict[str, torch.Tensor]:
    """A batch with unequal numbers of labels in its rows."""
    torch.manual_seed(step)
    ids = torch.randint(1, VOCABULARY, (rows, length))
    labels = ids.clone()
    labels[0, : 1 + step % 3] = -100
    labels[rows - 1, 1:] = -100
    return {"input_ids": ids, "labels": labels}


def vectors(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    return {"x": torch.randn(6, 8, dtype=torch.float64)}


def images(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    return {"x": torch.randn(4, 3, 9, 9, dtype=torch.float64)}


MODELS: dict[str, tuple[Any, Any, Any]] = {  # how it is made, of how many layers; its batches, its plan
    "mlp": (lambda layers=2: Residual(8, 12, layers).double(), vectors, COLUMN_ROW),
    "llama": (lambda layers=2: llama(kv=2, layers=layers), text, "megatron"),
    "llama sequence": (lambda layers=2: llama(kv=2, layers=layers), text, "megatron+sp"),
    "gpt2": (lambda layers=2: gpt2(layers=layers), text, "megatron"),
    "bert": (lambda layers=2: bert(layers=layers), text, "megatron"),
    "resnet": (lambda layers=2: Net().double(), images, None),
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gathered without DTensor's own gather, which is coalesced on gloo, and may crash there."""
    return full_tensor(tensor) if is_dtensor(tensor) else tensor


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups: what has more than one dim decays, and the rest has another rate."""
    parameters = [p for _, p in model.named_parameters()]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


class Loop:
    """A user's loop: optimizer with groups, clipping, schedule."""

    def __init__(self, model: nn.Module, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        self.model = model
        self.optimizer = optimizer(groups_of(model), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def step(self, batch: dict[str, torch.Tensor], promoted: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss and the norm of the gradients."""
        with PromotedCasts() if promoted else contextlib.nullcontext():
            outputs = self.model(**batch)
        loss = outputs.loss if hasattr(outputs, "loss") else whole_loss(outputs)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss.detach(), whole(norm)


def whole_loss(outputs: torch.Tensor) -> torch.Tensor:
    return loss_of(whole(outputs))


def loop_alike(name: str, sizes: dict[str, int], layers: int = 2, count: int = 10) -> None:
    """Losses and norms equal the single-device loop's after each of so many steps, and at their end parameters and
    buffers; then what it evaluates to."""
    torch.manual_seed(0)
    make, batches, plan = MODELS[name]
    model = make(layers)
    mesh = Mesh(sizes)
    single = Loop(copy.deepcopy(model))
    if isinstance(plan, str) and "tp" not in sizes:
        plan = "ddp"
    if isinstance(plan, dict) and "tp" not in sizes:
        plan = None
    parallel = autopar.parallelize(model, mesh, plan)
    assert [n for n, _ in parallel.named_parameters()] == [n for n, _ in model.named_parameters()]
    alone = not torch.distributed.is_initialized()  # then parameters are the model's own
    assert all(isinstance(p, nn.Parameter) and is_dtensor(p) != alone for p in parallel.parameters())
    loop = Loop(parallel)
    for step in range(count):
        ours, theirs = loop.step(batches(step)), single.step(batches(step))
        for a, b in zip(ours, theirs, strict=True):
            assert type(a) is torch.Tensor and relative(a, b) <= 1e-9, (step, a, b)
    for (where, a), b in zip(parallel.named_parameters(), single.model.parameters(), strict=True):
        assert relative(whole(a), b) <= 1e-9, where
    for (where, a), b in zip(parallel.named_buffers(), single.model.buffers(), strict=True):
        assert relative(whole(a), b) <= 1e-9, where
    assert parallel.captures == 1
    parallel.eval()
    single.model.eval()
    with torch.no_grad(), PromotedCasts():
        ours, theirs = parallel(**batches(11)), single.model(**batches(11))
    assert relative(ours.loss, theirs.loss) <= 1e-9 if hasattr(ours, "loss") else relative(whole(ours), theirs) <= 1e-9
    assert parallel.captures == 2
