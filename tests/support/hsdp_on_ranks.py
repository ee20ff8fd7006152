"""HSDP on ranks: the layouts of parameters, of the optimizer's state and of state dicts, and the numbers of steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import Mesh

MESH = Mesh(replica=2, shard=2)


class Pair(nn.Module):
    """Two products, a bias that two ranks do not divide, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.odd = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(self.down(torch.relu(self.up(x)))).square().mean()


def made() -> nn.Module:
    torch.manual_seed(0)
    return Pair().double()


def batches(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 8, generator=generator, dtype=torch.float64) for _ in range(count)]


def eager(clip: float | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of a single device, and its parameters after the last step."""
    model, losses = made(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x in batches():
        loss = model(x)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def trained(options: dict[str, Any]) -> dict[str, Any]:
    """Train on the mesh; with options ``None`` by the loop of torch, else by a compiled step."""
    parallel = autopar.parallelize(made(), MESH, "hsdp")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    step = None if options.pop("loop", False) else parallel.train_step(optimizer, **options)
    losses = []
    for x in batches():
        if step is not None:
            losses.append(step(x).item())
            continue
        loss = parallel(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = parallel.state_dict()
    moments = [entry["exp_avg"] for entry in optimizer.state.values()]
    assert all(isinstance(tensor, DTensor) for tensor in (*state.values(), *moments))
    told = {
        "losses": losses,
        "placements": {name: str(tensor.placements) for name, tensor in state.items()},
        "moments": [(str(m.placements), tuple(m.to_local().shape)) for m in moments],
        "parameters": {name: tensor.full_tensor() for name, tensor in state.items()},
    }
    parallel.close()
    return told
