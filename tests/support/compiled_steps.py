"""Steps whose functions Inductor compiles, beside steps that run as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from equality import relative
from torch import distributed, nn

import autopar
from autopar import Mesh
from autopar.runtime.recording import recording

Batch = dict[str, torch.Tensor]


class Layer(nn.Module):
    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(x))))


class Net(nn.Module):
    """Equal layers, and two biases whose gradients are one expression."""

    def __init__(self, layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(8, dropout) for _ in range(layers))
        self.one, self.other = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x + self.one + self.other).square().mean()


def batch(k: int, dtype: torch.dtype) -> Batch:
    return {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(k)).to(dtype)}


def made(
    sizes: dict[str, int], plan: Any, dtype: torch.dtype, compile: bool, dropout: float = 0.0, **options: Any
) -> Any:
    torch.manual_seed(0)
    parallel = autopar.parallelize(Net(dropout=dropout).to(dtype), Mesh(sizes), plan, compile=compile)
    return parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9), **options)


def state_of(step: Any) -> dict[str, torch.Tensor]:
    found = {name: full(value) for name, value in step.parallel.named_parameters()}
    for k, held in enumerate(step.optimizer.state.values()):
        found |= {f"{k} {name}": full(value) for name, value in held.items() if isinstance(value, torch.Tensor)}
    return found


def full(value: Any) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def trained(step: Any, dtype: torch.dtype, steps: int = 3) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    losses = []
    for k in range(steps):
        torch.manual_seed(k)
        losses.append(step(batch(k, dtype)).clone())
    return losses, state_of(step)


def alike(
    sizes: dict[str, int], plan: Any, dtype: torch.dtype, most: float, dropout: float = 0.0, **options: Any
) -> Any:
    """Compiled and uncompiled steps have the same numbers. Returns the compiled one."""
    ours = made(sizes, plan, dtype, True, dropout, **options)
    theirs = made(sizes, plan, dtype, False, dropout, **options)
    (losses, state), (right, expected) = trained(ours, dtype), trained(theirs, dtype)
    assert all(relative(a, b) <= most for a, b in zip(losses, right, strict=True)), (losses, right)
    assert state.keys() == expected.keys() and all(relative(state[n], expected[n]) <= most for n in state)
    assert theirs.parallel.regions is None
    return ours


def on_ranks(cases: list[tuple[dict[str, int], Any, torch.dtype, float, dict[str, Any]]]) -> list[tuple[int, int]]:
    """On each rank: the numbers are alike, and so is the order of collectives. Returns regions and distinct graphs."""
    found = []
    for sizes, plan, dtype, most, options in cases:
        ours = alike(sizes, plan, dtype, most, **options)
        regions = ours.parallel.regions
        assert 0 < regions.distinct < regions.count
        orders = [exchanges(step, dtype) for step in (ours, made(sizes, plan, dtype, False, **options))]
        assert orders[0] == orders[1] and orders[0], "collectives start and are waited for in the order of the schedule"
        found.append((regions.count, regions.distinct))
    distributed.barrier()
    return found


def exchanges(step: Any, dtype: torch.dtype) -> list[tuple[str, str]]:
    """The starts and waits of a step, in the order in which they run."""
    record: Callable[..., Any] = recording
    with record(in_slots=True) as recorder:
        step(batch(9, dtype))
    return [(line.kind, line.name) for run in recorder.runs for line in run.lines if line.kind != "compute"]


def alike_on_stages() -> None:
    """On each rank: the passes of stages are compiled, and have the numbers of uncompiled ones."""
    step = alike({"pp": 2}, None, torch.float64, 1e-10, microbatches=2, schedule="1f1b")
    assert step.parallel.regions.count > 0
