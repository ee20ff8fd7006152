"""Recurrent layers, which keep a list of their parameters beside them and make it anew when these are others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from processes import ranks
from test_equality import check_equal, relative
from torch import nn

import autopar
from autopar import Mesh


@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(dp=2, tp=2)], ids=str)
@pytest.mark.parametrize("options", [{"batch_first": True}, {"num_layers": 2, "bidirectional": True}], ids=str)
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_layers(kind: Any, options: dict[str, Any], mesh: Mesh) -> None:
    model = kind(6, 5, **options).double()
    kept = list(model._flat_weights)
    check_equal(model, mesh, None, (torch.randn(4, 3, 6, dtype=torch.float64),))
    assert all(a is b for a, b in zip(model._flat_weights, kept, strict=True))


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_float32(kind: Any) -> None:
    """For which a CPU has ops of its own."""
    check_equal(kind(6, 5, batch_first=True), Mesh(dp=2), None, (torch.randn(4, 3, 6),), tolerance=1e-4)


class Read(nn.Module):
    """A loss of the last of what a recurrent layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.Layer, self.Norm = nn.GRU(6, 8, batch_first=True), nn.LayerNorm(8)  # names as people give them

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.Norm(self.Layer(x)[0][:, -1]), y)


def trained(zero: int) -> None:
    """Labels are every other number of a tensor, and a micro-batch has one row of each rank, or two: then the layer is captured again,
    with parameters that zero=3 has laid otherwise since."""
    torch.manual_seed(0)
    model = Read().double()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2))
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), zero=zero, microbatches=2)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for rows in (4, 8, 4):
        x, table = torch.randn(rows, 3, 6, dtype=torch.float64), torch.randint(8, (rows, 2))
        loss = alone(x, table[:, 0])
        assert relative(step(x, table[:, 0]), loss.detach()) <= 1e-12
        loss.backward(), optimizer.step(), optimizer.zero_grad()
    for ours, own in zip(parallel.parameters(), alone.parameters(), strict=True):
        assert relative(ours.full_tensor(), own.detach()) <= 1e-12
    assert step.captures == 2
    assert {row.phase for row in step.memory(0)} == {"forward", "backward", "update"}


@pytest.mark.parametrize("zero", [0, 3])
def test_steps_on_processes(zero: int) -> None:
    ranks(2).run(trained, zero)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_cells(kind: Any) -> None:
    """The gates' weights are split gate by gate."""
    gates = {nn.RNNCell: 1, nn.LSTMCell: 4, nn.GRUCell: 3}[kind]
    plan = {"weight_*": (f"({gates} -1/tp)", None), "bias_*": (f"({gates} -1/tp)",)}
    parallel = check_equal(kind(6, 4).double(), Mesh(dp=2, tp=2), plan, (torch.randn(5, 6, dtype=torch.float64),))
    assert parallel.reports["place"].notes == ()
