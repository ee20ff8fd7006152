"""Decompose ops at capture that no sharding rule could describe.

A mean over a split batch is not the mean of the ranks' means. So a mean becomes a sum and a division by the
global count. Ops that make a tensor "like" another with a new shape become ``full``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from autopar.capture.decompose.batch_norm import BATCH_NORM
from autopar.capture.decompose.batch_norm import wide as _wide
from autopar.capture.decompose.lists import LISTS
from autopar.capture.decompose.strides import STRIDES
from autopar.torch_private import aten, present

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for a loss's reduction


def _count(x, dims) -> int:
    return math.prod(x.shape[d] for d in dims or range(x.dim())) if x.dim() else 1


def mean(x, *, dtype=None):
    """``mean(x) → sum(x) / n``."""
    return aten.div.Scalar(aten.sum.default(x, dtype=dtype), x.numel())


def mean_dim(x, dim, keepdim=False, *, dtype=None):
    """``mean(x, dims) → sum(x, dims) / n``."""
    return aten.div.Scalar(aten.sum.dim_IntList(x, dim, keepdim, dtype=dtype), _count(x, dim))


def var(x, dim=None, *, correction=None, keepdim=False):
    """``sum((x - mean)²) / (n - correction)``, with the global mean and n."""
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def var_mean(x, dim=None, *, correction=None, keepdim=False):
    """Decompose the variance and the mean, each into a sum and a division.

    The variance of complex numbers is the sum of the variances of both parts.
    """
    if x.is_complex():
        parts = aten.view_as_real.default(x)
        real, imaginary = (
            var(aten.select.int(parts, -1, k), dim, correction=correction, keepdim=keepdim) for k in (0, 1)
        )
        return aten.add.Tensor(real, imaginary), mean_dim(x, dim or list(range(x.dim())), keepdim)
    wide = _wide(x)
    middle = mean_dim(wide, dim or list(range(x.dim())), True)
    off = aten.sub.Tensor(wide, middle)
    total = aten.sum.dim_IntList(aten.mul.Tensor(off, off), dim, keepdim)
    left = max(_count(x, dim) - (1 if correction is None else correction), 0)
    spread = _narrow(aten.div.Scalar(total, left), x)
    return spread, _narrow(middle if keepdim else aten.view.default(middle, spread.shape), x)


def _narrow(y, x):
    return y if y.dtype == x.dtype else aten._to_copy.default(y, dtype=x.dtype)


def std(x, dim=None, *, correction=None, keepdim=False):
    """Return the root of the variance."""
    return aten.sqrt.default(var(x, dim, correction=correction, keepdim=keepdim))


def std_mean(x, dim=None, *, correction=None, keepdim=False):
    """Return the root of the variance, and the mean."""
    spread, middle = var_mean(x, dim, correction=correction, keepdim=keepdim)
    return aten.sqrt.default(spread), middle


def norm(x, order, dim, keepdim=False):
    """``linalg_vector_norm`` under its old name."""
    return aten.linalg_vector_norm.default(x, 2 if order is None else order, dim, keepdim)


def linalg_vector_norm(x, order=2, dim=None, keepdim=False, *, dtype=None):
    """Decompose orders 1 and 2 into a sum of magnitudes and the root of a sum of squares.

    Other orders stay whole.
    """
    if order not in (1, 2) or x.is_complex() or dtype not in (None, x.dtype):
        return NotImplemented
    wide = _wide(x)
    total = aten.sum.dim_IntList(aten.abs.default(wide) if order == 1 else aten.mul.Tensor(wide, wide), dim, keepdim)
    return _narrow(total if order == 1 else aten.sqrt.default(total), x)


def log_sigmoid_forward(x):
    """``min(x, 0) - log(1 + exp(-|x|))``. The second result is for the backward, which needs only ``x``."""
    small = aten.log1p.default(aten.exp.default(aten.neg.default(aten.abs.default(x))))
    return aten.sub.Tensor(aten.clamp_max.default(x, 0), small), x


def log_sigmoid_backward(gradient, x, buffer):
    """``gradient · sigmoid(-x)``."""
    return aten.mul.Tensor(gradient, aten.sigmoid.default(aten.neg.default(x)))


def _nll_loss_forward(op):
    def forward(scores, target, weight, reduction, ignore_index):
        """``mean → sum / total weight``: both are sums over the batch.

        The total weight depends on the targets alone.
        """
        if reduction != MEAN:
            return NotImplemented
        count = _total_weight(target, weight, ignore_index, scores.dtype)
        return aten.div.Tensor(op(scores, target, weight, SUM, ignore_index)[0], count), count

    return forward


def _total_weight(target, weight, ignore_index, dtype):
    """Return the number of targets that are not ignored, or the sum of the weights of their classes."""
    kept = aten.ne.Scalar(target, ignore_index)
    if weight is None:
        return aten._to_copy.default(aten.sum.default(kept), dtype=dtype)
    weights = aten.index.Tensor(weight, [aten.where.ScalarOther(kept, target, 0)])
    return aten.sum.default(aten.mul.Tensor(weights, kept))


def _nll_loss_backward(op):
    def backward(gradient, scores, target, weight, reduction, ignore_index, total_weight):
        """The backward of the mean is that of the sum, with the gradient divided by the total weight."""
        if reduction != MEAN:
            return NotImplemented
        return op(aten.div.Tensor(gradient, total_weight), scores, target, weight, SUM, ignore_index, total_weight)

    return backward


def _per_element(op, position):
    """``loss(x, y, …, sum) → sum(loss(x, y, …, none))``; the mean is divided by the number of elements."""

    def forward(*args):
        elementwise, reduction = _without_reduction(args, position)
        return NotImplemented if reduction == NONE else _reduce(op(*elementwise), reduction)

    return forward


def _per_element_backward(op, position):
    """The gradient of a sum is the gradient of every element; that of a mean is divided by their number."""

    def backward(*args):
        (gradient, x, *arguments), reduction = _without_reduction(args, position)
        if reduction == NONE:
            return NotImplemented
        return op(aten.div.Scalar(gradient, x.numel()) if reduction == MEAN else gradient, x, *arguments)

    return backward


def _without_reduction(args, position):
    """Return the arguments of a loss with the reduction replaced by none, and the reduction, which may be a default."""
    reduction = args[position] if len(args) > position else MEAN
    missing = [None] * (position - len(args))
    return (*args[:position], *missing, NONE, *args[position + 1 :]), reduction


def mse_loss(x, y, reduction=MEAN):
    """``(x - y)²``, summed, and divided by the number of elements for the mean."""
    difference = aten.sub.Tensor(x, y)
    return _reduce(aten.mul.Tensor(difference, difference), reduction)


def mse_loss_backward(gradient, x, y, reduction):
    """``2 (x - y) · gradient``, divided by the number of elements for the mean."""
    scale = 2.0 / x.numel() if reduction == MEAN else 2.0
    return aten.mul.Tensor(aten.mul.Scalar(aten.sub.Tensor(x, y), scale), gradient)


def multilabel_margin_loss_forward(x, target, reduction):
    """``max(0, 1 - x[target] + x[other]) / n`` over all pairs; a row's targets end before its first -1."""
    n = max(x.shape[-1], 1) if x.dim() else 1
    if not x.dim():
        loss, is_target = multilabel_margin_loss_forward(
            aten.unsqueeze.default(x, 0), aten.view.default(target, [1]), reduction
        )
        return loss, aten.view.default(is_target, [])
    is_listed = aten._to_copy.default(aten.ge.Scalar(target, 0), dtype=x.dtype)
    is_listed = aten.cumprod.default(is_listed, -1)
    target = aten.clamp_min.default(target, 0)
    hits = aten.scatter_add.default(aten.zeros_like.default(x), -1, target, is_listed)
    is_target = aten._to_copy.default(aten.gt.Scalar(hits, 0), dtype=x.dtype)
    low = aten.unsqueeze.default(aten.sub.Tensor(aten.gather.default(x, -1, target), 1), -1)  # [… targets 1]
    margin = aten.relu.default(aten.sub.Tensor(aten.unsqueeze.default(x, -2), low))  # [… targets classes]
    left_out = aten.logical_or.default(
        aten.unsqueeze.default(aten.eq.Scalar(is_listed, 0), -1), aten.unsqueeze.default(aten.gt.Scalar(hits, 0), -2)
    )
    margin = aten.masked_fill.Scalar(margin, left_out, 0)
    return _reduce(aten.div.Scalar(aten.sum.dim_IntList(margin, [-2, -1]), n), reduction), is_target


def _margin_backward(op, position):
    """The backward of the mean is that of the sum, with the gradient divided by the number of rows."""

    def backward(*args):
        (gradient, x, *arguments), reduction = _without_reduction(args, position)
        if reduction != MEAN:
            return NotImplemented
        arguments[position - 2] = SUM
        return op(aten.div.Scalar(gradient, x.shape[0] if x.dim() == 2 else 1), x, *arguments)

    return backward


def convolution_backward(gradient, x, weight, bias_sizes, *options):
    """Compute the bias's gradient as a sum of the gradient alone.

    So it does not depend on how the input is split.
    """
    *how, (of_x, of_weight, of_bias) = options
    if not of_bias:
        return NotImplemented
    dx, dw = None, None
    if of_x or of_weight:
        dx, dw, _ = aten.convolution_backward.default(gradient, x, weight, None, *how, [of_x, of_weight, False])
    return dx, dw, aten.sum.dim_IntList(gradient, [0, *range(2, x.dim())])


def _of_transposed(op):
    """Transpose a matrix that is not contiguous, so that a determinant keeps its factors for the backward.

    They are then the same as on a piece. For a contiguous matrix, as pieces are, torch keeps the factors of the
    transposed matrix. The backward is captured for one of the two.
    """

    def apart(x):
        if x.is_contiguous() or x.is_complex():
            return NotImplemented
        return op(aten.clone.default(aten.transpose.int(x, -2, -1), memory_format=torch.contiguous_format))

    return apart


def _reduce(x, reduction):
    if reduction == SUM:
        return aten.sum.default(x)
    return mean(x) if reduction == MEAN else x


def _full(value: float | None) -> Callable[..., Any]:
    def make(x, size, *fill, dtype=None, layout=None, device=None, pin_memory=None):
        number = fill[0] if value is None else value
        return aten.full.default(size, number, dtype=dtype or x.dtype, device=device or x.device)

    return make


def squeeze(x, dims=None):
    """Name only the dims of size one, because other dims may have size one on a rank."""
    ndim = x.dim()
    chosen = range(ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    ones = sorted({d % ndim for d in chosen if ndim and x.shape[d] == 1})
    return NotImplemented if ones == dims else aten.squeeze.dims(x, ones)


def cat(tensors, dim=0):
    """Drop an operand of shape ``[0]``, which torch allows beside any shape.

    A cache of keys and values begins as one.
    """
    full = [x for x in tensors if tuple(x.shape) != (0,)]
    if not full or len(full) == len(tensors) or full[0].dim() == 1 or any(x.dtype != full[0].dtype for x in tensors):
        return NotImplemented
    return (
        aten.cat.default(full, dim)
        if len(full) > 1
        else aten.clone.default(full[0], memory_format=torch.contiguous_format)
    )


def _of_a_number(op):
    """Give a tensor without dims one dim for a look-up or an addition by index."""

    def apart(x, dim, *operands, **options):
        if x.dim():
            return NotImplemented
        flat = [aten.view.default(y, [-1]) if isinstance(y, torch.Tensor) else y for y in operands]
        result = op(aten.view.default(x, [1]), dim, *flat, **options)
        return aten.view.default(result, operands[0].shape if op is aten.gather.default else [])

    return apart


def _of_complex(op):
    """Compare complex numbers with zero first: they have no maximum, by which pieces of a truth are reduced."""

    def apart(x, *dims):
        return op(aten.ne.Scalar(x, 0), *dims) if x.is_complex() else NotImplemented

    return apart


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    """Make zeros: the contents of an empty tensor are undefined and may differ from rank to rank."""
    return aten.full.default(size, 0, dtype=dtype or torch.get_default_dtype(), device=device)


def _empty_like(x, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    how = {} if memory_format is None else {"memory_format": memory_format}
    return aten.zeros_like.default(x, dtype=dtype, device=device, **how)


def split(x, size, dim=0):
    """``split(x, 2) → split_with_sizes(x, [2, 2, 1])``, which has the same number of results for an empty piece."""
    whole = x.shape[dim]
    return aten.split_with_sizes.default(
        x, [min(size, whole - start) for start in range(0, max(whole, 1), max(size, 1))], dim
    )


_TABLE: dict[Any, Callable[..., Any]] = {
    aten.mean.default: mean,
    aten.mean.dim: mean_dim,
    aten.var.correction: var,
    aten.var_mean.correction: var_mean,
    aten.std.correction: std,
    aten.std_mean.correction: std_mean,
    aten.norm.ScalarOpt_dim: norm,
    aten.linalg_vector_norm.default: linalg_vector_norm,
    aten.log_sigmoid_forward.default: log_sigmoid_forward,
    aten.log_sigmoid_backward.default: log_sigmoid_backward,
    aten.mse_loss.default: mse_loss,
    aten.mse_loss_backward.default: mse_loss_backward,
    aten.convolution_backward.default: convolution_backward,
    aten.multilabel_margin_loss_forward.default: multilabel_margin_loss_forward,
    aten.multilabel_margin_loss_backward.default: _margin_backward(aten.multilabel_margin_loss_backward.default, 3),
    aten.multi_margin_loss_backward.default: _margin_backward(aten.multi_margin_loss_backward.default, 6),
    **{
        op: _of_a_number(op)
        for op in (aten.gather.default, aten.index_select.default, aten.index_add.default, aten.scatter_add.default)
    },
    **{
        op: _of_complex(op)
        for op in (aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims)
    },
    aten._linalg_det.default: _of_transposed(aten._linalg_det.default),
    aten._linalg_slogdet.default: _of_transposed(aten._linalg_slogdet.default),
    **BATCH_NORM,
    **LISTS,
    **STRIDES,
    aten.split.Tensor: split,
    aten.unsafe_split.Tensor: split,
    aten.squeeze.default: squeeze,
    aten.squeeze.dim: squeeze,
    aten.squeeze.dims: squeeze,
    aten.cat.default: cat,
    aten._reshape_alias.default: lambda x, size, stride: aten.view.default(x, size),
    aten.new_zeros.default: _full(0),
    aten.new_ones.default: _full(1),
    aten.new_full.default: _full(None),
    aten.new_empty.default: _full(0),
    aten.empty.memory_format: _empty,
    aten.empty_like.default: _empty_like,
    aten.new_empty_strided.default: lambda x, size, stride, **options: _full(0)(x, size, **options),
    aten.empty_strided.default: lambda size, stride, **options: _empty(size, **options),
    aten.empty_permuted.default: lambda size, order, **options: _empty(size, **options),
    aten.dist.default: lambda x, y, order=2: aten.linalg_vector_norm.default(aten.sub.Tensor(x, y), order),
}
for op in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
    _TABLE[op] = _nll_loss_forward(op)
for op in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default):
    _TABLE[op] = _nll_loss_backward(op)
for forward, backward, position in (  # the position of the argument ``reduction``
    (aten.smooth_l1_loss, aten.smooth_l1_loss_backward, 2),
    (aten.huber_loss, aten.huber_loss_backward, 2),
    (aten.soft_margin_loss, aten.soft_margin_loss_backward, 2),
    (aten.binary_cross_entropy, aten.binary_cross_entropy_backward, 3),
):
    _TABLE[forward.default] = _per_element(forward.default, position)
    _TABLE[backward.default] = _per_element_backward(backward.default, position + 1)
logits_loss = aten.binary_cross_entropy_with_logits.default
_TABLE[logits_loss] = _per_element(logits_loss, 4)
DECOMPOSITIONS = present(_TABLE)

# ops that return their operand, or equal a view: dropped or renamed at capture
IDENTITIES = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default})
SYNONYMS = present({aten._unsafe_view.default: aten.view.default})
TRANSPOSE = aten.t.default  # twice, it is the value itself
COPY, ZEROS, FULL = aten.copy.default, aten.zeros_like.default, aten.full.default
INDEX, SQUEEZE, ARANGE, ARANGE_FROM = aten.index.Tensor, aten.squeeze.dims, aten.arange.default, aten.arange.start
# op → the position of the number that only the mean reads, which is decomposed here
UNREAD = {aten.nll_loss_backward.default: 6, aten.nll_loss2d_backward.default: 6}
VIEWS = frozenset({
    aten.view.default, aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default,
    aten.expand.default, aten.squeeze.dims, aten.slice.Tensor, aten.select.int,
})  # fmt: skip
