"""Tensors that are written at a mask, indices that are tensors of one number, and what is reduced over chosen rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import CaptureError, Mesh
from autopar.capture import capture

Function = Callable[..., Any]
d = torch.float64


class Masked(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.lin, self.function, self.norm = nn.Linear(4, 4, dtype=d), function, nn.BatchNorm1d(4, dtype=d)
        self.token, self.table = nn.Parameter(torch.randn(4, dtype=d)), nn.Parameter(torch.randn(5, 4, dtype=d))
        self.register_buffer("fixed", torch.tensor([True, False, True, True, False, True]))
        self.register_buffer("at", torch.tensor(-2))
        self.plain = torch.tensor([False, True, True])

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, self.lin(x), x, x[..., 0] > 0)


def token(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    h[mask] = self.token
    return h


def number_of_a_token(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    h[mask, 0] = self.token[0]
    return h


def part_of_a_token(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    h[~mask, ..., 1:3] = self.token[None, :2]
    return h


def columns(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    h[:, self.token > 0] = x[:, :1] * self.token[0]
    return h


def number_everywhere(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    h[x > 0] = self.token.sum()
    return h


def index_put(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h.index_put((mask,), self.token) + h.index_put((mask,), self.token, True)


def added(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    h[mask] += self.token
    h[mask, 1] = (x * 2)[mask][:, 0]
    return h


def number(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    k = mask.sum() % 4
    return h * self.table[k] + h[:, k, None] + self.table[self.at, k]


def written_number(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    h[:, mask.sum() % 4] = x[:, 1] * self.token[0]
    h[mask.sum() % 4] = self.token
    return h


def fixed(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h[self.fixed] * 2 + self.table[~torch.tensor([False, True, False, False, False])] + h[:3][self.plain].sum()


def classes(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    kinds = torch.tensor([0, 1, 2, 3, 1, 2])
    counts = torch.bincount(mask.long(), minlength=5) + torch.bincount(mask.long(), h[:, 0].detach(), 5)
    return h + F.one_hot(kinds).to(d) @ self.table[:4] + counts @ self.table


def losses(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(h[mask], x[mask]) + F.smooth_l1_loss(h[mask], self.token.expand_as(h[mask]), reduction="sum")


def norms(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h[mask].norm() + torch.linalg.vector_norm(h[mask], 3, dim=0)


def log_of_a_sum(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(h[mask], 0) + h[mask].prod(0, keepdim=True)


def extremes(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h[mask].amax(0) - h[mask].amin() + h[mask].max()


def product(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h[mask].t() @ x[mask].exp()


def normalized(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return self.norm(h[mask]).pow(3).sum()


def by_experts(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    kinds = mask.long()
    pieces = h[kinds.argsort(stable=True)].split(torch.bincount(kinds, minlength=2).tolist())
    return torch.cat([pieces[0] * self.token, pieces[1].tanh()])


CAPTURED = [
    token, number_of_a_token, part_of_a_token, columns, number_everywhere, index_put, added, number, written_number,
    fixed, classes, losses, norms, log_of_a_sum, extremes, product, normalized, by_experts,
]  # fmt: skip


def batch(seed: int) -> torch.Tensor:
    return torch.randn(6, 4, dtype=d, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("function", CAPTURED)
def test_eagers_numbers_for_other_values(function: Function) -> None:
    """Of batches with other rows, with all and with none; eager refuses some of these."""
    torch.manual_seed(1)
    model = Masked(function)
    single = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), {"*.lin.weight": ("tp", None)}, example=(batch(0),))
    compared = 0
    for given in (batch(0), batch(1), batch(0).abs(), -batch(0).abs()):
        model.zero_grad(), single.zero_grad()
        try:
            expected = single(given)
        except (RuntimeError, ValueError, IndexError):
            single.load_state_dict(model.state_dict())
            continue
        expected.square().sum().backward()
        found = parallel.simulate(given)
        found.square().sum().backward()
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
        for (name, ours), theirs in zip(model.named_parameters(), single.parameters(), strict=True):
            wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            if expected.isfinite().all():
                gradient = torch.zeros_like(theirs) if ours.grad is None else ours.grad
                torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-9, msg=name)
        torch.testing.assert_close(model.state_dict(), single.state_dict(), rtol=1e-10, atol=1e-10)
        compared += 1
    assert compared >= 2 and parallel.captures == 1


def test_a_mask_of_a_buffer_is_checked_in_each_call() -> None:
    model = Masked(fixed)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(batch(0),))
    model.fixed[0] = False
    with pytest.raises(RuntimeError, match=r"captured for another answer to this line\n    test_masks_and_positions"):
        parallel.simulate(batch(0))


def other_classes(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h + F.one_hot(mask.long()).to(d) @ self.table[:2]


def other_counts(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h * torch.bincount(mask.long())[0]


def other_dtype(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    h = h + x[mask].sum()  # which keeps values in the graph
    h[mask] = self.token.float()
    return h


def mixed(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h[mask].log_softmax(0).sum()


def varied(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h[mask].std(0)


def summed_up(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h[mask].cumsum(0).sum()


def two_numbers(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    h[self.at, mask.sum() % 4] = 1.0
    return h


def a_mask_and_positions(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    h[mask, torch.tensor([0])] = self.token[0]
    return h


REFUSED: dict[Function, tuple[str, str]] = {
    other_classes: ("makes one_hot of classes whose number is a value", "F.one_hot(ids, classes)"),
    other_counts: ("counts with bincount, and how many classes there are is a value", "minlength=classes"),
    other_dtype: ("writes torch.float32 at the positions of a mask into torch.float64", "value.to(x.dtype)"),
    mixed: ("computes log_softmax of the rows", "h.masked_fill(~mask[:, None], -math.inf).log_softmax(0)"),
    varied: ("computes std of the rows", "compute it of sums"),
    summed_up: ("computes cumsum of the rows", "h.masked_fill(~mask[:, None], 0).cumsum(0)"),
    two_numbers: ("writes at several positions that are tensors", "in two steps"),
    a_mask_and_positions: ("depends on the values of its tensors", "torch.where"),
}


@pytest.mark.parametrize("function", REFUSED)
def test_the_remedy_is_of_the_case(function: Function) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Masked(function), (batch(0),))
    problem, remedy = REFUSED[function]
    text = str(caught.value)
    assert problem in text and remedy in text and "test_masks_and_positions.py:" in text, text


def test_a_class_beyond_those_that_are_counted() -> None:
    def counted(self: Any, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return h * torch.bincount(mask.long() * 7, minlength=2)[0]

    parallel = autopar.parallelize(Masked(counted), Mesh(dp=2), "ddp")
    with pytest.raises(RuntimeError, match="class values are not all between 0 and 1, as one_hot of 2 classes"):
        parallel.simulate(batch(0))
