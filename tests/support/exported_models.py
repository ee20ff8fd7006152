"""Models and their exported programs, and their comparison on a rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export

import autopar
from autopar import Mesh

PLAN = {"*.up.weight": ("tp", None), "*.down.weight": (None, "tp")}


class Net(nn.Module):
    """A batch norm with state, a part without gradients, a keyword, a buffer, and a structured output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.relu(self.norm(self.up(x))) * self.scale
        with torch.no_grad():
            weights = self.up(x).softmax(-1)
        out = self.down(hidden * weights * mask[:, None])
        return {"out": out, "loss": out.square().mean()}


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, mask = torch.randn(rows, 8, generator=generator), torch.rand(rows, generator=generator)
    return x.double(), mask.double()


def exported(model: nn.Module, dynamic: bool = False) -> ExportedProgram:
    x, mask = batch()
    rows = Dim("rows", min=4, max=16)
    shapes: Any = {"x": {0: rows}, "mask": {0: rows}} if dynamic else None
    return export(model, (x,), {"mask": mask}, dynamic_shapes=shapes)


def gradients(model: nn.Module, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    (outputs["loss"] + outputs["out"].square().sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def trains_on_processes() -> None:
    """On a rank: two calls of an exported program, their gradients and statistics, beside the model's."""
    model = net()
    eager = copy.deepcopy(model)
    parallel = autopar.parallelize(exported(model, True), Mesh(dp=2), "ddp", outputs="global")
    for rows in (8, 6):
        x, mask = batch(rows)
        ours, theirs = parallel(x, mask=mask), eager(x, mask=mask)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    expected = gradients(eager, theirs)
    ours["loss"].backward(retain_graph=True)
    parallel.zero_grad()
    found = gradients(parallel, ours)
    assert list(found) == list(expected)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient.full_tensor(), expected[name], rtol=1e-9, atol=1e-12)
    buffers = dict(parallel.named_buffers())
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, rtol=1e-10, atol=1e-12)
    parallel.close()
