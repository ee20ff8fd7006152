"""Errors that begin in torch or in the model, and say where in the model."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.utils.checkpoint
from test_bad_input import refuses, x
from torch import nn

import autopar
from autopar import CaptureError, Mesh


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)


def test_reentrant_checkpoints() -> None:
    refuses(
        CaptureError,
        r"the model checkpoints with use_reentrant=True, which runs a backward of its own\n  checkpoint with use_reentrant=False",
        Checkpointed(),
        example=(x.clone().requires_grad_(),),
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors take notes from 3.11 on")
def test_an_error_of_the_models_own_says_where_it_comes_from() -> None:
    with pytest.raises(RuntimeError) as caught:
        autopar.parallelize(nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 4)), Mesh(dp=2), example=(x,))
    (note,) = caught.value.__notes__
    assert note.startswith("while autopar captured the step, at\n") and note.endswith("in module 1")
