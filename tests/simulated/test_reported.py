"""Inputs on which comparable systems were wrong, on three axes, on stages, and in micro-batches.

The inputs of a setting train together, as parts of one model; the campaign ``reported`` tries each of them alone.
"""

from __future__ import annotations

import pytest
import torch
from equality import check_equal
from reported_inputs import INPUTS, REFUSED, RIGHT, SETTINGS, together, trained
from torch import nn

from autopar import CaptureError, Mesh

pytestmark = pytest.mark.long


@pytest.mark.parametrize("setting", ["three axes", "stages", "micro-batches"])
def test_values_of_one_device(setting: str) -> None:
    trained(together(RIGHT), SETTINGS[setting])


@pytest.mark.parametrize(
    ("name", "setting"), [*zip(REFUSED, ["three axes", "stages", "micro-batches", "compile"], strict=True)]
)
def test_refused(name: str, setting: str) -> None:
    """What a step that is captured once cannot repeat: no setting lets it pass."""
    with pytest.raises(CaptureError, match="a captured step keeps the value of the first call"):
        trained(INPUTS[name].make, SETTINGS[setting])


@pytest.mark.parametrize(("kind", "rows", "mesh"), [(nn.GRU, 2, Mesh(dp=4)), (nn.LSTM, 1, Mesh(dp=3, tp=2))], ids=str)
def test_recurrent_layers_with_fewer_rows_than_ranks(kind: type[nn.Module], rows: int, mesh: Mesh) -> None:
    layer = kind(6, 5, batch_first=True).double()
    check_equal(layer, mesh, None, (torch.randn(rows, 3, 6, dtype=torch.float64),))
