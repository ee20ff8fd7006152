"""Values without elements: eager's numbers, and nothing is sent."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Mesh
from autopar.ir import transfers
from autopar.ir.nodes import tensor_type

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")


class Empty(nn.Module):
    """An adapter of rank 0, a layer without results and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 0, bias=False), nn.Linear(0, 8, bias=False)
        self.none, self.empty = nn.Linear(8, 0), nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) + self.up(self.down(x))
        return (y.square().mean(1) + self.none(x).sum(1) + self.empty.sum()).mean()


STEPS: list[tuple[dict[str, int], Any, dict[str, Any]]] = [
    ({"dp": 2}, "ddp", {}),
    ({"dp": 2}, "ddp", {"zero": 2, "clip_norm": 0.1}),
    ({"dp": 2}, "fsdp", {"zero": 3}),
    ({"dp": 2, "tp": 2, "cp": 2}, {"*a.weight": ("tp", None)}, {"zero": 1, "across": True}),
    ({"pp": 2, "dp": 2}, "ddp", {"schedule": "1f1b", "microbatches": 2, "zero": 1}),
]


@pytest.mark.parametrize(("sizes", "plan", "options"), STEPS)
def test_steps(sizes: dict[str, int], plan: Any, options: dict[str, Any]) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)), Empty()).double()
    x, whole = torch.randn(8, 8, dtype=torch.float64), copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(**sizes), plan, example=(x,))
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), **options)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for _ in range(2):
        loss = step.simulate(x)
        wanted = whole(x)
        optimizer.zero_grad()
        wanted.backward()
        if "clip_norm" in options:
            nn.utils.clip_grad_norm_(whole.parameters(), options["clip_norm"])
        optimizer.step()
        torch.testing.assert_close(loss, wanted.detach())


def test_nothing_is_sent() -> None:
    model, x = Empty(), torch.randn(8, 8)
    parallel = autopar.parallelize(model, Mesh(dp=2), "fsdp", example=(x,))
    sent, left = (
        [node for node in program.nodes if (row := transfers.BY_FUNCTION.get(node.target)) and row.collective]
        for program in (parallel.program, autopar.localize(parallel.program)[0])
    )
    assert any(0 in tensor_type(node).shape for node in sent)
    assert left and all(0 not in tensor_type(node).shape for node in left)
