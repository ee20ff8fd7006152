"""Recurrent layers, which keep a list of their parameters beside them and make it anew when these are others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_equality import check_equal
from torch import nn

from autopar import Mesh


@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(dp=2, tp=2)], ids=str)
@pytest.mark.parametrize("options", [{"batch_first": True}, {"num_layers": 2, "bidirectional": True}], ids=str)
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_layers(kind: Any, options: dict[str, Any], mesh: Mesh) -> None:
    model = kind(6, 5, **options).double()
    kept = list(model._flat_weights)
    check_equal(model, mesh, None, (torch.randn(4, 3, 6, dtype=torch.float64),))
    assert all(a is b for a, b in zip(model._flat_weights, kept, strict=True))


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_cells(kind: Any) -> None:
    """The gates' weights are split gate by gate."""
    gates = {nn.RNNCell: 1, nn.LSTMCell: 4, nn.GRUCell: 3}[kind]
    plan = {"weight_*": (f"({gates} -1/tp)", None), "bias_*": (f"({gates} -1/tp)",)}
    parallel = check_equal(kind(6, 4).double(), Mesh(dp=2, tp=2), plan, (torch.randn(5, 6, dtype=torch.float64),))
    assert parallel.reports["place"].notes == ()
