"""The price of a searched plan is that of the program that runs, also where the search counts less."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import autopar
from autopar import Mesh
from autopar.model import compiled

pytestmark = pytest.mark.simulated


def test_a_program_that_costs_more_than_the_search_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(8, 64)
    plain = autopar.parallelize(model, Mesh(a=2, b=2), example=(x,)).solution
    assert plain is not None and plain.exact
    extra = 5002
    dearer = lambda program, machine: SimpleNamespace(nanoseconds=plain.nanoseconds + extra)  # noqa: E731
    monkeypatch.setattr(compiled, "price", dearer)
    solution = autopar.parallelize(model, Mesh(a=2, b=2), example=(x,)).solution
    assert solution is not None and not solution.exact
    assert (solution.nanoseconds, solution.least) == (plain.nanoseconds + extra, plain.least)
