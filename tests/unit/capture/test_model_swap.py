"""A capture swaps a model's tensors: what forward does to the model becomes state, is noted, or is undone."""

from __future__ import annotations

import concurrent.futures
import copy

import pytest
import torch
from equality import TOLERANCE, check_equal, relative
from models import Block
from torch import nn

import autopar
from autopar import Mesh
from autopar.capture import capture

d = torch.float64


def test_buffers_that_are_written_are_state() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=d))
            self.register_buffer("total", torch.zeros(4, dtype=d))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            self.total.add_(x.sum(0))
            return x * self.seen

    model = Counter()
    eager = copy.deepcopy(model)
    x = torch.randn(5, 4, dtype=d, requires_grad=True)
    parallel = autopar.parallelize(model, Mesh(dp=2), {"total": ("dp",), "x": ("dp",)}, example=(x,))
    assert torch.equal(model.seen, eager.seen), "capture changes nothing"
    assert "total : f64[4/dp] = state(" in str(parallel.program)
    for _ in range(3):
        assert torch.allclose(parallel.simulate(x), eager(x))
    assert torch.equal(model.seen, eager.seen) and torch.allclose(model.total, eager.total)


def test_capture_leaves_model_and_arguments_alone() -> None:
    model, x = Block(), torch.randn(4, 8)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    kept, random = x.clone(), torch.get_rng_state()
    capture(model, (x,))
    assert torch.equal(x, kept) and all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and torch.equal(torch.get_rng_state(), random)


def test_a_module_with_two_names_keeps_its_weights() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared).double()
    weight = shared.weight
    check_equal(model, Mesh(dp=2, tp=2), {"0.weight": ("tp", None)}, (torch.randn(4, 8, dtype=d),))
    assert shared.weight is weight and type(shared.weight) is nn.Parameter


def test_a_buffer_that_is_given_a_new_tensor_is_state() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.register_buffer("ema", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            self.ema = self.ema * 0.9 + y.detach().mean(0)
            return y - self.ema

    model, x = Average().double(), torch.randn(5, 8, dtype=d)
    eager = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x,))
    assert not model.ema.any()
    for _ in range(3):
        assert relative(parallel.simulate(x), eager(x)) <= TOLERANCE
    assert relative(model.ema, eager.ema) <= TOLERANCE


def test_recurrent_weights_are_not_constants() -> None:
    """A module may list its parameters once more in a plain list, as recurrent ones do."""

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.also = [self.inner.weight]
            self.pair = (self.inner.bias, "why")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.also[0] + self.pair[0]

    model = Listed().double()
    model.also, model.pair = [model.inner.weight], (model.inner.bias, "why")
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x := torch.randn(4, 8, dtype=d),))
    parallel.simulate(x).sum().backward()
    assert torch.allclose(model.inner.weight.grad, x.sum(0)[:, None].expand(8, 8))
    assert model.also[0] is model.inner.weight and model.pair[0] is model.inner.bias


def test_a_number_that_forward_changes_is_reported_and_put_back() -> None:
    class Counts(Block):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    model = Counts()
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(torch.randn(4, 8),))
    assert model.calls == 0
    assert "forward changes calls; the captured step keeps the values of the first call" in str(parallel.reports)


@pytest.mark.simulated
def test_captures_in_threads() -> None:
    model = Block().double()
    parallel = autopar.parallelize(model, Mesh(dp=2))
    inputs = [torch.randn(k + 2, 8, dtype=d) for k in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        outputs = list(pool.map(parallel.simulate, inputs))
    for x, y in zip(inputs, outputs, strict=True):
        assert relative(y, model(x)) <= TOLERANCE


def test_parameters_in_nested_containers() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(8, 8)
            self.held = {"a": [(self.w.weight, "why")]}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.held["a"][0][0]

    model = Nested()
    held = model.held["a"][0]
    check_equal(model.double(), Mesh(dp=2), None, (torch.randn(4, 8, dtype=d),))
    assert model.held["a"][0] is held and held[0] is model.w.weight
