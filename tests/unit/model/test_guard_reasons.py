"""What the guards say where a capture has no symbols."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Mesh
from autopar.model import captures


class Scaled(nn.Module):
    """Divides by a power of a size, which is no integer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) / x.shape[0] ** 0.5


class Weighted(nn.Module):
    """Has a loss of which torch cannot capture the parts with symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 4)
        self.register_buffer("w", torch.ones(4))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.up(x), t, weight=self.w, label_smoothing=0.1)


def test_what_torch_cannot_capture_is_said_in_words() -> None:
    parallel = autopar.parallelize(Weighted(), Mesh(dp=2), "ddp", dynamic=True)
    for batch in (8, 4, 12):
        parallel.capture(torch.ones(batch, 6), torch.zeros(batch, dtype=torch.long))
    (reason,) = parallel.guards.symbols
    assert re.fullmatch(
        r"each size is captured by itself, because torch cannot capture this call with symbols for its sizes "
        r"\(TypeError: unhashable type: non-nested SymInt\)\n"
        r"    test_guard_reasons.py:\d+  return nn.functional.cross_entropy\(.*",
        reason,
    )


@pytest.mark.parametrize("error", [ValueError("no\nmore of it"), RuntimeError()])
def test_words_of_other_errors(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(captures, "capture_with_symbols", fail)
    parallel = autopar.parallelize(nn.Linear(6, 6), Mesh(dp=2), "ddp", dynamic=True)
    parallel.capture(torch.ones(4, 6))
    said = f"{type(error).__name__}: no" if error.args else type(error).__name__
    torchs = f"torch cannot capture this call with symbols for its sizes ({said})"
    assert list(parallel.guards.symbols) == [f"each size is captured by itself, because {torchs}"]


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
