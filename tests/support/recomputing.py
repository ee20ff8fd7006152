"""Steps that are compiled with recomputation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from equality import loss_of
from models import Block
from torch import nn

import autopar.model.compiled
from autopar import Mesh
from autopar.passes import Pass, pipeline


@contextlib.contextmanager
def recomputing(what: str | Sequence[str] | None) -> Iterator[None]:
    """What is compiled in the block computes again what ``Recompute(what)`` says; ``None``: nothing."""

    def with_recompute(mesh: Mesh, attrs: Any, **options: Any) -> list[Pass]:
        return pipeline(mesh, attrs, **{**options, "recompute": what})

    with mock.patch.object(autopar.model.compiled, "pipeline", with_recompute):
        yield


def results(parallel: Any, batch: Mapping[str, torch.Tensor], call: str = "simulate") -> list[torch.Tensor | None]:
    """The outputs' loss, all gradients, all buffers after one step with this seed."""
    model = parallel.module
    model.zero_grad()
    torch.manual_seed(5)
    outputs = parallel.simulate(**batch) if call == "simulate" else parallel(**batch)
    loss = outputs.loss if hasattr(outputs, "loss") else loss_of(outputs)
    loss.backward()
    owner = model if call == "simulate" else parallel
    return [loss.detach(), *(p.grad for p in owner.parameters()), *(b.clone() for b in owner.buffers())]


def same(a: Sequence[torch.Tensor | None], b: Sequence[torch.Tensor | None]) -> bool:
    """Bit by bit."""
    return len(a) == len(b) and all(
        x is y is None or (x is not None and y is not None and torch.equal(x, y)) for x, y in zip(a, b, strict=True)
    )


class Loss(nn.Module):
    """A model's loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        outputs = self.model(**batch)
        return outputs.loss if hasattr(outputs, "loss") else outputs.square().mean()


class Dropping(nn.Module):
    """Residual column-row pairs with dropout inside and behind."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.drop = nn.Dropout(0.3)
        for layer in self.layers:
            layer.act = nn.Sequential(nn.GELU(), nn.Dropout(0.4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.drop(layer(x))
        return x.square().mean()


class Counting(nn.Module):
    """A layer that reads a buffer and then writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x) * torch.cat(self.scale.unsqueeze(0).split(4, 1), 1))  # a copy of views
        self.scale = self.scale + 1
        return y


class Normed(nn.Module):
    """Layers with state: counts, and batch norms with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), Counting()) for _ in range(2))
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))
