"""A capture of attention whose mask is causal by its positions has no mask, and eager's numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import TOLERANCE, relative
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.capture import capture

d = torch.float64


class Attention(nn.Module):
    """Attention under a mask. ``how``: passes the mask, or is called."""

    def __init__(self, mask: Callable[[int], torch.Tensor], how: Any = "mask") -> None:
        super().__init__()
        self.mask, self.how, self.qkv = mask, how, nn.Linear(8, 24, dtype=d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "checkpoint":
            return checkpoint(self.attend, x, use_reentrant=False)
        return self.attend(x)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        mask = self.mask(x.shape[1])
        if callable(self.how):
            return self.how(q, k, v, mask)
        if self.how == "position":
            return F.scaled_dot_product_attention(q, k, v, mask, 0.0, scale=0.5)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.5)


def later(n: int) -> torch.Tensor:
    return torch.arange(n)[None, :] <= torch.arange(n)[:, None]


def window(n: int) -> torch.Tensor:
    return later(n) & (torch.arange(n)[None, :] > torch.arange(n)[:, None] - 3)


def attentions(program: Any) -> list[tuple[bool, bool]]:
    """Of each attention, forward and backward: whether it is causal, and whether it has a mask."""
    calls = re.findall(r"= _scaled_dot_product_\w+\((.*)\)", str(program))
    return [(", True" in call, "attn_mask" in call) for call in calls]


def alike(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> Any:
    """Compare a capture with eager, values and gradients."""
    parallel = autopar.parallelize(model, autopar.Mesh(dp=2), "ddp", **options)
    for x in inputs:
        expected = model(x)
        gradients = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
        ours = parallel.simulate(x)
        assert relative(ours, expected) <= TOLERANCE
        found = torch.autograd.grad(ours.square().sum(), list(parallel.parameters()))
        assert all(relative(a, b) <= TOLERANCE for a, b in zip(found, gradients, strict=True))
    return parallel


@pytest.mark.parametrize("how", ["mask", "position", "checkpoint"])
def test_a_causal_mask_is_left_out(how: str) -> None:
    parallel = alike(Attention(later, how), torch.randn(4, 6, 8, dtype=d))
    assert set(attentions(parallel.program)) == {(True, False)} and "le." not in str(parallel.program)
    said = "attention runs as causal, without the mask that forward makes of positions (1 call)"
    assert said in str(parallel.reports)


def test_a_mask_that_hides_nothing_is_left_out() -> None:
    model = Attention(lambda n: torch.ones(n, n, dtype=torch.bool))
    captured = capture(model, (torch.randn(2, 6, 8, dtype=d),))
    assert set(attentions(captured.program)) == {(False, False)}
    assert "attention runs without the mask that forward makes, which hides nothing (1 call)" in captured.notes


def test_a_window_stays_a_mask() -> None:
    parallel = alike(Attention(window), torch.randn(4, 6, 8, dtype=d))
    assert set(attentions(parallel.program)) == {(False, True)}


def test_a_window_that_is_longer_than_all_sequences_is_none() -> None:
    parallel = alike(Attention(window), torch.randn(4, 3, 8, dtype=d))
    assert set(attentions(parallel.program)) == {(True, False)}


@pytest.mark.parametrize(("mask", "expected"), [(later, (True, False)), (window, (False, True))])
def test_of_any_length(mask: Callable[[int], torch.Tensor], expected: tuple[bool, bool]) -> None:
    """A mask that is causal for all lengths is left out, and no other one, whatever the length of the first call."""
    lengths = [3, 6, 2]
    parallel = alike(Attention(mask), *(torch.randn(4, n, 8, dtype=d) for n in lengths), dynamic=True)
    assert parallel.captures == 1 and set(attentions(parallel.program)) == {expected}


def test_a_mask_that_the_caller_passes_stays() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention(lambda n: self.given)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            self.attention.mask = lambda n: mask
            out = self.attention(x)
            del self.attention.mask
            return out

    captured = capture(Given(), (torch.randn(2, 6, 8, dtype=d), later(6)))
    assert set(attentions(captured.program)) == {(False, True)}


CASES: dict[str, Callable[..., torch.Tensor]] = {
    "causal besides": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, torch.ones_like(m), is_causal=True),
    "its own gradient": lambda q, k, v, m: _with_gradient(q, k, v, torch.zeros(m.shape, dtype=d).requires_grad_()),
}


def _with_gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = F.scaled_dot_product_attention(q, k, v, mask)
    (gradient,) = torch.autograd.grad(out.sum(), mask, create_graph=True)
    return out * gradient.square().sum()


class Doubled(TorchFunctionMode):
    """Doubles attention, which it knows by its function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        return result * 2 if func is F.scaled_dot_product_attention else result


def _doubled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with Doubled():
        return F.scaled_dot_product_attention(q, k, v, mask)


CASES["a mode of the user's"] = _doubled


@pytest.mark.parametrize("case", CASES)
def test_what_surrounds_a_mask(case: str) -> None:
    """What the caller asks for besides is done as in eager."""
    model = Attention(later, CASES[case])
    alike(model, torch.randn(4, 6, 8, dtype=d))
