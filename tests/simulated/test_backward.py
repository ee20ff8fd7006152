"""The backward of a simulated step: which gradients there are, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from equality import TOLERANCE, check_equal, relative
from models import COLUMN_ROW, Block, Residual
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import Mesh

d = torch.float64


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(x)


def test_an_output_without_a_gradient_gives_none() -> None:
    """Not zeros: an optimizer with weight decay would change a parameter whose gradient is zero."""
    model, x = Both().double(), torch.randn(4, 8, dtype=d)
    eager = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x,))
    for _ in range(2):
        parallel.simulate(x)[0].sum().backward()
        eager(x)[0].sum().backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert theirs.grad is None or torch.allclose(ours.grad, theirs.grad)
    assert parallel.captures == 1
    assert str(parallel.program).count("= tangent(") == 2, "the program is that of the call, not of its special case"


class Mixed(nn.Module):
    """Two outputs whose gradients meet: in a sum, and broadcast, and where one is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.a(x))
        left, right = h.chunk(2, dim=-1)
        return {"p": self.b(h), "q": h * self.c, "r": left - right, "s": left.sum()}


@pytest.mark.parametrize("given", ["p", "q", "r", "s", "pq", "rs", "ps", "pqr"])
def test_every_choice_of_gradients(given: str) -> None:
    model, x = Mixed().double(), torch.randn(6, 8, dtype=d, requires_grad=True)
    eager, y = copy.deepcopy(model), x.detach().clone().requires_grad_()
    outputs = autopar.parallelize(model, Mesh(dp=2), {"a.weight": (None, "dp")}, example=(x,)).simulate(x)
    sum(outputs[k].square().sum() for k in given).backward()
    expected = eager(y)
    sum(expected[k].square().sum() for k in given).backward()
    for ours, theirs in zip([x, *model.parameters()], [y, *eager.parameters()], strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert theirs.grad is None or relative(ours.grad, theirs.grad) <= TOLERANCE


def test_gradients_of_gradients_are_refused() -> None:
    model, x = Block().double(), torch.randn(4, 8, dtype=d, requires_grad=True)
    y = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x,)).simulate(x)
    with pytest.raises(RuntimeError, match=r"differentiated once.*create_graph=True is refused"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_training_equals_training_on_one_device() -> None:
    model = Residual().double()
    eager = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), COLUMN_ROW)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1) for m in (model, eager))
    for step in range(20):
        x = torch.randn(4 + step % 3, 8, dtype=d)
        for optimizer, call in ((ours, parallel.simulate), (theirs, eager)):
            optimizer.zero_grad()
            call(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        assert relative(a, b) <= 1e-9


def test_backward_twice() -> None:
    """As in eager: with ``retain_graph`` the saved values serve again, without it torch refuses."""
    model, x = Block().double(), torch.randn(4, 8, dtype=d)
    eager = copy.deepcopy(model)
    y = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x,)).simulate(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    (2 * eager(x).sum()).backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_a_parameter_changed_before_backward_is_refused() -> None:
    model, x = Block().double(), torch.randn(4, 8, dtype=d)
    y = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x,)).simulate(x)
    with torch.no_grad():
        model.up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Recomputed(nn.Module):
    """A checkpointed block with a trained layer and a buffer: its backward reads them again."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(8, 8)
        self.register_buffer("b", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda t: torch.tanh(self.w(t) * self.b), x, use_reentrant=False)


def test_what_the_backward_reads_is_no_constant() -> None:
    model, x = Recomputed().double(), torch.randn(6, 8, dtype=d)
    parallel = check_equal(model, Mesh(dp=2), None, (x,))
    model.b = torch.full((8,), 3.0, dtype=d)
    model.zero_grad()
    eager = copy.deepcopy(model)
    for call in (parallel.simulate, eager):
        call(x).square().sum().backward()
    assert relative(model.w.weight.grad, eager.w.weight.grad) <= TOLERANCE


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_results_that_are_not_contiguous(order: tuple[int, ...]) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w(x).permute(order) * 2

    check_equal(Turned().double(), Mesh(dp=2, tp=2), {"w.weight": ("tp",)}, (torch.randn(3, 5, 4, dtype=d),))


def test_views_of_what_was_written_in_place() -> None:
    """Functionalizing makes the views late, behind the backward: they belong to the forward."""

    class Assigned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.u = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 1))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            h = self.a(x)
            h[:, 0] = self.u[:, 0]
            return h[:, 0], h[:, 1:], h

    check_equal(Assigned().double(), Mesh(dp=2), None, (torch.randn(6, 6, dtype=d),))


class Offset(nn.Module):
    """Its gradients are the tangents as they are: a backward without an op."""

    def __init__(self) -> None:
        super().__init__()
        self.offset, self.linear = nn.Parameter(torch.randn(4, 6).double()), nn.Linear(6, 6).double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x + self.offset
        return h, self.linear(h)


@pytest.mark.parametrize("plan", ["ddp", {"offset": (None, "dp"), "x": ("dp",)}, {"offset": ("dp",)}])
@pytest.mark.parametrize("which", [0, 1])
def test_a_backward_without_an_op(plan: Any, which: int) -> None:
    model, x = Offset(), torch.randn(4, 6).double()
    parallel = autopar.parallelize(model, Mesh(dp=2), plan, example=(x,))
    parallel.simulate(x)[which].square().sum().backward()
    ours = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    model(x)[which].square().sum().backward()
    for mine, theirs in zip(ours, (p.grad for p in model.parameters()), strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.allclose(mine, theirs, rtol=1e-12)
