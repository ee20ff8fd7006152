"""Inputs that ranks bring in pieces, beside a search: they have the plan's layouts, or the defaults."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Mesh, PlanError

MESH = Mesh(dp=2, tp=2)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))


@pytest.mark.parametrize("spec", [("?", None), ("?", "?"), ("dp", "?")])
def test_open_dims_of_an_input_are_refused(model: nn.Module, spec: Any) -> None:
    text = (
        "the plan leaves a dim of the input input open ('?'), and with inputs=\"local\" each rank brings its piece of "
        'it, so its layout is known before the search; give an axis or None for each dim, or use inputs="global"'
    )
    with pytest.raises(PlanError, match=re.escape(text)):
        autopar.parallelize(model, MESH, ["search", {"input": spec}], inputs="local", example=(torch.ones(4, 8),))


@pytest.mark.parametrize(
    ("plan", "shape"),
    [
        ("search", "f32[8/dp 8]"),
        (["search", {"0.weight": ("?", None)}], "f32[8/dp 8]"),  # a parameter may be open
        (["search", {"input": ("tp", None)}], "f32[8/tp 8]"),
        (["search", {"input": (None, "tp")}], "f32[4 16/tp]"),
        (["search", {"input": (None, None)}], "f32[4 8]"),
    ],
)
def test_the_layouts_of_pieces(model: nn.Module, plan: Any, shape: str) -> None:
    if shape.endswith("16/tp]"):
        model = nn.Linear(16, 8, bias=False)
    parallel = autopar.parallelize(model, MESH, plan, inputs="local", example=(torch.ones(4, 8),))
    assert f"input_1 : {shape} = input" in str(parallel.program)


def test_an_open_parameter_beside_zero() -> None:
    model = nn.Linear(8, 8, bias=False).double()
    model.register_forward_hook(lambda module, given, result: result.square().mean())
    parallel = autopar.parallelize(model, MESH, ["search", {"weight": ("?", None)}])
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), 0.1), zero=1)
    x = torch.randn(4, 8, dtype=torch.float64)
    expected = model(x).item()
    assert float(step.simulate(x)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("plan", ["ddp", "search"])
def test_a_simulation_takes_no_pieces(model: nn.Module, plan: str) -> None:
    parallel = autopar.parallelize(model, MESH, plan, inputs="local")
    with pytest.raises(RuntimeError, match=r'a simulation takes the whole; to simulate, call .* with inputs="global"'):
        parallel.simulate(torch.ones(4, 8))
