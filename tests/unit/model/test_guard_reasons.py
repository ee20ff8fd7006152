"""What the guards say where a capture has no symbols."""

from __future__ import annotations

import re

import torch
from torch import nn

import autopar
from autopar import Mesh


class Scaled(nn.Module):
    """Divides by a power of a size, which is no integer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) / x.shape[0] ** 0.5


def test_the_reason_has_its_line() -> None:
    parallel = autopar.parallelize(Scaled(), Mesh(dp=2), "ddp", dynamic=True)
    parallel.capture(torch.ones(4, 6))
    (reason,) = parallel.guards.symbols
    assert re.fullmatch(
        r"each size is captured by itself, because a number that is no integer follows from dim 0 of x\n"
        r"    test_guard_reasons.py:\d+  return self.up\(x\) / x.shape\[0\] \*\* 0.5",
        reason,
    )
    assert reason in str(parallel.guards)
