"""Decompose batch norm at capture, so that a split batch has the statistics of the whole batch.

A mean and a variance become sums, global counts and divisions, in forward and backward. Running statistics are written
with ``copy_``, which capture turns into state: ``native_batch_norm`` writes them too, but its schema does not declare
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.torch_private import aten, present


def wide(x):
    """Convert to float32 at least: squares and their sums are computed in it, as in torch's own kernels."""
    return _as(x, _wide_dtype(x))


def _wide_dtype(x) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _as(y, dtype: torch.dtype):
    return y if y.dtype == dtype else aten._to_copy.default(y, dtype=dtype)


def _over_channels(x) -> Callable[[Any], Any]:
    """Return a function that reshapes one value per channel so that it broadcasts against ``x``."""
    shape = [1, x.shape[1], *[1] * (x.dim() - 2)]
    return lambda value: aten.view.default(value, shape)


def _sum(x):
    """Sum over all dims but the channels."""
    return aten.sum.dim_IntList(x, [d for d in range(x.dim()) if d != 1])


def _count(x) -> int:
    return math.prod(x.shape) // max(x.shape[1], 1)


def _inverse_root(variance, eps: float):
    return aten.rsqrt.default(aten.add.Scalar(variance, eps))


def _blend(running, new, momentum: float) -> None:
    """``running ← (1 - momentum) · running + momentum · new``."""
    old, new = aten.mul.Scalar(wide(running), 1 - momentum), aten.mul.Scalar(_as(new, _wide_dtype(running)), momentum)
    aten.copy_.default(running, _as(aten.add.Tensor(old, new), running.dtype))


def _normalized(x, weight, bias, mean, scale):
    """``(x - mean) · scale``, with weight and bias, in the dtype of ``x``."""
    along = _over_channels(x)
    y = aten.mul.Tensor(aten.sub.Tensor(wide(x), along(mean)), along(scale))
    y = y if weight is None else aten.mul.Tensor(y, along(wide(weight)))
    return _as(y if bias is None else aten.add.Tensor(y, along(wide(bias))), x.dtype)


def batch_norm(x, weight, bias, running_mean, running_var, training: bool, momentum: float, eps: float):
    """Return the normalized batch, its mean, and the inverse root of its variance.

    The last two are empty in evaluation.
    """
    if not training:
        none = aten.full.default([0], 0, dtype=_wide_dtype(x), device=x.device)
        scale = _inverse_root(wide(running_var), eps)
        return _normalized(x, weight, bias, wide(running_mean), scale), none, none
    count = _count(x)
    mean = aten.div.Scalar(_sum(wide(x)), count)
    off = aten.sub.Tensor(wide(x), _over_channels(x)(mean))
    squares = _sum(aten.mul.Tensor(off, off))
    scale = _inverse_root(aten.div.Scalar(squares, count), eps)
    if running_mean is not None:
        _blend(running_mean, mean, momentum)
    if running_var is not None:
        _blend(running_var, aten.div.Scalar(squares, count - 1), momentum)
    return _normalized(x, weight, bias, mean, scale), mean, scale


def batch_norm_backward(
    gradient, x, weight, running_mean, running_var, mean, scale, training: bool, eps: float, mask: Sequence[bool]
):
    """Return the gradients, with two sums over the batch.

    They are the sums of the gradient, and of the gradient times the normalized input.
    """
    if not training:
        mean, scale = wide(running_mean), _inverse_root(wide(running_var), eps)
    along, dy = _over_channels(x), wide(gradient)
    normal = aten.mul.Tensor(aten.sub.Tensor(wide(x), along(mean)), along(scale))
    total, product = _sum(dy), _sum(aten.mul.Tensor(dy, normal))
    dtype = x.dtype if weight is None else weight.dtype
    factor = scale if weight is None else aten.mul.Tensor(scale, wide(weight))
    if training:
        count = _count(x)
        shared = aten.mul.Tensor(normal, along(aten.div.Scalar(product, count)))
        dy = aten.sub.Tensor(aten.sub.Tensor(dy, along(aten.div.Scalar(total, count))), shared)
    dx = _as(aten.mul.Tensor(dy, along(factor)), x.dtype)
    return tuple(
        g if needed else None for g, needed in zip((dx, _as(product, dtype), _as(total, dtype)), mask, strict=True)
    )


def _reserved(x):
    """Return an empty reserve: the memory that a kernel would keep for its backward."""
    return aten.full.default([0], 0, dtype=torch.uint8, device=x.device)


def _no_stats(x, weight, bias, training: bool, momentum: float, eps: float):
    return batch_norm(x, weight, bias, None, None, training, momentum, eps)


def _trained(x, weight, bias, running_mean, running_var, momentum: float, eps: float):
    return *batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps), _reserved(x)


def _evaluated(x, weight, bias, running_mean, running_var, momentum: float, eps: float):
    return batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)


def _with_reserve(x, *args):
    return *batch_norm(x, *args), _reserved(x)


def _of_a_kernel(x, gradient, weight, running_mean, running_var, mean, scale, eps: float, *_):
    """Decompose the backward of cuDNN and MIOpen, which exists for training only."""
    return batch_norm_backward(
        gradient, x, weight, running_mean, running_var, mean, scale, True, eps, (True, True, True)
    )


BATCH_NORM: dict[Any, Callable[..., Any]] = present(
    {
        aten.native_batch_norm.default: batch_norm,
        aten._native_batch_norm_legit.default: batch_norm,
        aten._native_batch_norm_legit.no_stats: _no_stats,
        aten._native_batch_norm_legit_no_training.default: _evaluated,
        aten._batch_norm_with_update.default: _trained,
        aten._batch_norm_no_update.default: lambda x, *args: (*_evaluated(x, *args), _reserved(x)),
        aten.cudnn_batch_norm.default: _with_reserve,
        aten.miopen_batch_norm.default: batch_norm,
        aten.native_batch_norm_backward.default: batch_norm_backward,
        aten.batch_norm_backward.default: lambda *args: batch_norm_backward(*args[:-1]),
        aten.cudnn_batch_norm_backward.default: _of_a_kernel,
        aten.miopen_batch_norm_backward.default: _of_a_kernel,
    }
)
