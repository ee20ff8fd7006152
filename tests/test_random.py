"""Random ops are refused, however they are called, with the line and the remedy; dropout that is off is not one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import CaptureError, Mesh


class Apply(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


def attention(x: torch.Tensor) -> torch.Tensor:
    x = x.view(1, 1, 4, 8)
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)


RANDOM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand": lambda x: x + torch.rand(8),
    "rand with a generator": lambda x: x + torch.rand(8, generator=torch.Generator()),
    "rand_like": lambda x: x + torch.rand_like(x),
    "normal": lambda x: x + torch.normal(0.0, 1.0, (8,)),
    "uniform_": lambda x: x + torch.empty(8).uniform_(),
    "randperm": lambda x: x[:, torch.randperm(8)],
    "multinomial": lambda x: torch.multinomial(x.softmax(1), 2).float(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "dropout": lambda x: F.dropout(x, 0.1),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.1, training=True),
    "gumbel_softmax": F.gumbel_softmax,
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": attention,
}
MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RANDOM)
def test_refused(name: str, mode: Any) -> None:
    with mode(), pytest.raises(CaptureError) as caught:
        autopar.parallelize(Apply(RANDOM[name]), Mesh(dp=2), example=(torch.randn(4, 8),))
    first, line, remedy = str(caught.value).splitlines()
    assert first.endswith(" draws random numbers, which have no sharding rule yet")
    assert "test_random.py:" in line and line.endswith("in module the root")
    assert remedy == "  set the dropout probability to 0, call model.eval(), or pass the random tensor in"


@pytest.mark.parametrize("mode", MODES)
def test_dropout_that_is_off(mode: Any) -> None:
    model = nn.Sequential(nn.Dropout(0.0), nn.Dropout(0.5).eval(), nn.RReLU().eval(), nn.AlphaDropout(0.5).eval())
    x = torch.randn(4, 8)
    with mode():
        assert torch.equal(autopar.parallelize(model, Mesh(dp=2)).simulate(x), model(x))
