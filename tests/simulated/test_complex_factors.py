"""Complex numbers of Python as factors and divisors, with their gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import autopar
from autopar import Mesh


class Scaled(nn.Module):
    def __init__(self, scale: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.w, self.scale = nn.Parameter(torch.randn(8, 6, dtype=torch.complex128)), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(x @ self.w).abs()


SCALES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "factor": lambda y: y * 2j,
    "divisor": lambda y: y / (1 + 2j),
    "twice": lambda y: (3j - y * 1j) * (y - 1j),
}


@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(dp=2, tp=2, cp=2)], ids=str)
@pytest.mark.parametrize("name", SCALES)
def test_gradients(name: str, mesh: Mesh) -> None:
    model, x = Scaled(SCALES[name]), torch.randn(4, 8, dtype=torch.complex128)
    parallel = autopar.parallelize(copy.deepcopy(model), mesh, "ddp", example=(x,))
    found, wanted = parallel.simulate(x), model(x)
    torch.testing.assert_close(found, wanted)
    seed = torch.randn_like(wanted)
    found.backward(seed)
    wanted.backward(seed)
    torch.testing.assert_close(next(parallel.parameters()).grad, model.w.grad)
