"""Ops that are taken apart at capture, because no sharding rule could say what they do to pieces.

A mean over a split batch is not the mean of the ranks' means; so means become a sum, a count and a division, where the
count is the global one. Ops that make a tensor "like" another with a new shape become ``full``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
MEAN, SUM = 1, 2  # torch's numbers for a loss's reduction


def _count(x, dims) -> int:
    chosen = range(x.dim()) if not dims else dims
    return math.prod(x.shape[d] for d in chosen)


def mean(x, *, dtype=None):
    """``mean(x) → sum(x) / n``."""
    return aten.div.Scalar(aten.sum.default(x, dtype=dtype), x.numel())


def mean_dim(x, dim, keepdim=False, *, dtype=None):
    """``mean(x, dims) → sum(x, dims) / n``."""
    return aten.div.Scalar(aten.sum.dim_IntList(x, dim, keepdim, dtype=dtype), _count(x, dim))


def nll_loss_forward(scores, target, weight, reduction, ignore_index):
    """``mean → sum / total weight``: both are sums over the batch."""
    if reduction != MEAN:
        return NotImplemented
    total, count = aten.nll_loss_forward.default(scores, target, weight, SUM, ignore_index)
    return aten.div.Tensor(total, count), count


def nll_loss_backward(gradient, scores, target, weight, reduction, ignore_index, total_weight):
    """The backward of the mean is that of the sum, with the gradient divided by the total weight."""
    if reduction != MEAN:
        return NotImplemented
    scaled = aten.div.Tensor(gradient, total_weight)
    return aten.nll_loss_backward.default(scaled, scores, target, weight, SUM, ignore_index, total_weight)


def mse_loss(x, y, reduction=MEAN):
    """``(x - y)²``, summed, and divided by the number of elements for the mean."""
    difference = aten.sub.Tensor(x, y)
    return _reduce(aten.mul.Tensor(difference, difference), reduction)


def mse_loss_backward(gradient, x, y, reduction):
    """``2 (x - y) · gradient``, divided by the number of elements for the mean."""
    scale = 2.0 / x.numel() if reduction == MEAN else 2.0
    return aten.mul.Tensor(aten.mul.Scalar(aten.sub.Tensor(x, y), scale), gradient)


def _reduce(x, reduction):
    if reduction == SUM:
        return aten.sum.default(x)
    return mean(x) if reduction == MEAN else x


def _full(value: float | None) -> Callable[..., Any]:
    def make(x, size, *fill, dtype=None, layout=None, device=None, pin_memory=None):
        given = fill[0] if value is None else value
        return aten.full.default(size, given, dtype=dtype or x.dtype, device=device or x.device)

    return make


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.mean.default: mean,
    aten.mean.dim: mean_dim,
    aten.nll_loss_forward.default: nll_loss_forward,
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.mse_loss.default: mse_loss,
    aten.mse_loss_backward.default: mse_loss_backward,
    aten.new_zeros.default: _full(0),
    aten.new_ones.default: _full(1),
    aten.new_full.default: _full(None),
}

# ops that return their operand, or stand for a view: dropped or renamed at capture
IDENTITIES = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default})
SYNONYMS = {aten._unsafe_view.default: aten.view.default, aten._reshape_alias.default: aten.view.default}
TRANSPOSE = aten.t.default  # twice, it is the value itself
