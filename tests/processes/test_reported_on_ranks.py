"""On three gloo ranks: a piece of the batch on each, stages, fewer rows than ranks, and sums in bf16."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from equality import relative
from processes import ranks
from reported_inputs import RIGHT, Setting, rows, together, trained
from torch import distributed, nn

import autopar
from autopar import Mesh


class Recurrent(nn.Module):
    """A GRU, of whose rows there are fewer than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.layer = nn.Linear(8, 6), nn.GRU(6, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.up(x).unflatten(1, (1, 6)))[0].square().mean()


def together_on_ranks() -> None:
    trained(together(RIGHT), Setting({"dp": 3}, "ddp", {"inputs": "local"}, ranks=3))
    trained(together(RIGHT), Setting({"pp": 3}, None, {}, {"schedule": "1f1b", "microbatches": 2}, ranks=3))
    few_rows()
    low_sums()


def few_rows() -> None:
    """Two rows on three ranks."""
    torch.manual_seed(0)
    model = Recurrent().double()
    single = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=3), "ddp", cache=False)
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
    for k in range(2):
        x = rows(k)[:2]
        optimizer.zero_grad()
        wanted = single(x)
        wanted.backward()
        optimizer.step()
        assert relative(step(x), wanted) <= 1e-10
    for name, whole in wholes(parallel.named_parameters()).items():
        assert relative(whole, single.get_parameter(name)) <= 1e-10, name


def wholes(named: Iterable[tuple[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().full_tensor() for name, tensor in named}


def low_sums() -> None:
    """Gradients in bf16 are added over three ranks: all have the same bits, and they are near those of one device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).to(torch.bfloat16)
    x = torch.randn(12, 32, dtype=torch.bfloat16)
    single = copy.deepcopy(model).double()
    single(x.double()).square().mean().backward()
    for plan in ("ddp", "fsdp"):
        parallel = autopar.parallelize(model, Mesh(dp=3), plan, outputs="global", cache=False)
        parallel(x).square().mean().backward()
        for name, whole in wholes((n, p.grad) for n, p in parallel.named_parameters()).items():
            every = [torch.empty_like(whole) for _ in range(3)]
            distributed.all_gather(every, whole)
            assert all(torch.equal(every[0], other) for other in every), f"{name}: other bits on other ranks"
            right = single.get_parameter(name).grad
            assert right is not None and whole.dtype == torch.bfloat16
            assert relative(whole.double(), right) <= 2e-2, name


def test_values_of_one_device() -> None:
    ranks(3).run(together_on_ranks)
