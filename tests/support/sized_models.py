"""Make models with batches of any size, and compare their steps on a mesh with a single device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from conv_net import Net
from torch import nn
from transformers_models import bert, gpt2, llama

import autopar

d = torch.float64
VOCABULARY = 22


class Mlp(nn.Module):
    """Two linear layers, and a mean over rows and columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).logsumexp(-1).mean()


class Recurrent(nn.Module):
    """An LSTM, whose length is unrolled, with a batch that may be a symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0]).square().mean()


def tokens(batch: int, length: int) -> dict[str, Any]:
    ids = torch.randint(1, VOCABULARY, (batch, length))
    labels = ids.clone()
    labels[:, 0] = -100
    return {"input_ids": ids, "labels": labels}


def masked(batch: int, length: int) -> dict[str, Any]:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[:, -1] = 0
    return {**tokens(batch, length), "attention_mask": mask}


def longer(make: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    """A model with more positions than the batches of ``transformers_models`` need."""
    return lambda: make(layers=1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], dict[str, Any]]]] = {
    "mlp": (Mlp, lambda batch, length: {"x": torch.randn(batch, 8, dtype=d)}),
    "lstm": (Recurrent, lambda batch, length: {"x": torch.randn(batch, 5, 8, dtype=d)}),
    "conv": (Net, lambda batch, length: {"x": torch.randn(batch, 3, 8, 8, dtype=d)}),
    "llama": (longer(llama), tokens),
    "gpt2": (longer(gpt2), tokens),
    "bert": (longer(bert), masked),
}


def loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output.square().mean() if output.dim() else output
    return output.loss


def made(name: str) -> tuple[nn.Module, Callable[[int, int], dict[str, Any]]]:
    make, inputs = MODELS[name]
    return make().double(), inputs


def difference(parallel: autopar.Parallel, call: Callable[..., Any], model: nn.Module, inputs: dict[str, Any]) -> float:
    """The largest relative difference of loss and gradients from those of a single device."""
    eager = copy.deepcopy(model)
    eager.zero_grad()
    model.zero_grad()
    expected = loss_of(eager(**inputs))
    expected.backward()
    loss = loss_of(call(**inputs))
    loss.backward()
    pairs = [(loss.detach(), expected.detach())]
    for own, other in zip(model.parameters(), eager.parameters(), strict=True):
        if other.grad is not None:
            assert own.grad is not None
            pairs.append((own.grad, other.grad))
    for own, other in zip(model.buffers(), eager.buffers(), strict=True):
        pairs.append((own, other))
    return max(float((own - other).abs().max() / other.abs().max().clamp(min=1e-3)) for own, other in pairs)
