"""Models that torch.compile compiles with the backend autopar, and their comparison on a rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import autopar
from autopar import Mesh

PLAN = {"*.up.weight": ("tp", None), "*.down.weight": (None, "tp")}


class Net(nn.Module):
    """A batch norm with state, and a graph break."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.up, self.norm, self.down, self.breaks = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4), breaks

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        hidden = torch.relu(self.norm(self.up(x)))
        if self.breaks:
            torch.compiler.disable(lambda: None)()
        return {"out": self.down(hidden) * scale}


def net(breaks: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(breaks).double()


def check(compiled: Any, model: nn.Module, eager: nn.Module, *call: Any) -> None:
    """Outputs, gradients of parameters and of the input, and buffers are those of eager."""
    x, *rest = call
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    for module in (model, eager):
        module.zero_grad()
    found, expected = compiled(ours, *rest)["out"], eager(theirs, *rest)["out"]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
    for (name, a), b in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert type(a) is nn.Parameter and a.grad is not None and type(a.grad) is torch.Tensor
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12, msg=name)
    torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()), rtol=1e-10, atol=1e-12)


def compiles_on_processes() -> None:
    """On a rank: two calls of a model that the backend has compiled."""
    model = net(breaks=True)
    eager = copy.deepcopy(model)
    options = {"mesh": Mesh(dp=2), "plan": {}}
    compiled = torch.compile(model, backend=autopar.compile_backend, options=options)
    for rows in (8, 6):
        x = torch.randn(rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
        check(compiled, model, eager, x)
