"""Expand an op into other ops that do not need a dim whole, by a table.

    logits : f32[4/dp 32000/tp]                          m : f32[4/dp 1] +max:tp = amax(logits, [1], True)
    y : f32[4/dp 32000] = _log_softmax(logits, 1)   →    s : f32[4/dp 32000/tp] = sub(logits, m)
                                                         z : f32[4/dp 1] +tp = sum(exp(s), [1], True)
                                                         y : f32[4/dp 32000/tp] = sub(s, log(z))

An unexpanded op is one kernel, so an op is expanded only where the dim is split. A cross-entropy over split classes
then moves a few numbers per row instead of all classes (Shoeybi et al., arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.capture.decompose.batch_norm import wide
from autopar.capture.decompose.table import SUM
from autopar.ir.ops import sharded_lookup
from autopar.rules.binding import bind_node, typed
from autopar.rules.strategies import Bound
from autopar.torch_private import aten, op_named


@dataclass(frozen=True)
class Expansion:
    """One row of the table.

    Attributes:
        function: computes the op by other ops.
        dim: a function from the op's arguments to the dim that may be split once the op is expanded.
        operand: the operand that has this dim; -1: the result has it.
        least: the fewest elements of the dim for which expanding is better than gathering.
        applies: whether a call, with its arguments by position, can be expanded.
    """

    function: Callable[..., Any]
    dim: Callable[..., int]
    operand: int = 0
    least: int = 1
    applies: Callable[..., bool] = lambda *args, **kwargs: True

    def opened(self, bound: Bound, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
        """Return the factors of that dim, each with ``least``; empty if the call cannot be expanded."""
        dims = bound.results[0] if self.operand < 0 else bound.operands[self.operand]
        if not dims or not self.applies(*args, **kwargs):
            return ()
        return tuple((factor, self.least) for factor in dims[self.dim(*args, **kwargs)])


def _like(y, dtype):
    return y if y.dtype == dtype else aten._to_copy.default(y, dtype=dtype)


def _exponentials(x, dim):
    """Return ``x - max``, its exponentials, and their sum."""
    x = wide(x)
    less = aten.sub.Tensor(x, aten.amax.default(x, [dim], True))
    raised = aten.exp.default(less)
    return less, raised, aten.sum.dim_IntList(raised, [dim], True)


def softmax(x, dim, half_to_float):
    _, raised, total = _exponentials(x, dim)
    return _like(aten.div.Tensor(raised, total), torch.float32 if half_to_float else x.dtype)


def log_softmax(x, dim, half_to_float):
    less, _, total = _exponentials(x, dim)
    return _like(aten.sub.Tensor(less, aten.log.default(total)), torch.float32 if half_to_float else x.dtype)


def softmax_backward(gradient, y, dim, dtype):
    """``y · (g - Σ g·y)``."""
    gradient, y = wide(gradient), wide(y)
    product = aten.mul.Tensor(gradient, y)
    return _like(aten.sub.Tensor(product, aten.mul.Tensor(y, aten.sum.dim_IntList(product, [dim], True))), dtype)


def log_softmax_backward(gradient, y, dim, dtype):
    """``g - exp(y) · Σ g``."""
    gradient, y = wide(gradient), wide(y)
    return _like(
        aten.sub.Tensor(gradient, aten.mul.Tensor(aten.exp.default(y), aten.sum.dim_IntList(gradient, [dim], True))),
        dtype,
    )


def _places(size, like):
    return aten.arange.default(size, device=like.device)


def embedding(table, index, padding=-1, *_):
    return sharded_lookup.look_up(table, index, _places(table.shape[0], index), table.shape[0])


def embedding_backward(gradient, index, count, padding, by_frequency):
    if padding >= 0:  # the row of the padding gets no gradient
        used = aten.unsqueeze.default(aten.ne.Scalar(index, padding), -1)
        gradient = aten.mul.Tensor(gradient, _like(used, gradient.dtype))
    return sharded_lookup.look_up_backward(gradient, index, _places(count, index), count)


def gather(x, dim, index, **_):
    return sharded_lookup.gather_held(x, dim, index, _places(x.shape[dim], index), x.shape[dim])


def scatter_add(x, dim, index, source):
    return aten.add.Tensor(
        x, sharded_lookup.scatter_held(source, dim, index, _places(x.shape[dim], index), x.shape[dim])
    )


def _of_all_others(x, dim, index, source=None, **_) -> bool:
    """Return whether the index has the size of ``x`` in every other dim, and the source has the shape of the index."""
    others = all(
        n == m for k, (n, m) in enumerate(zip(x.shape, index.shape, strict=True)) if k != dim % max(len(x.shape), 1)
    )
    return bool(x.shape) and others and (source is None or source.shape == index.shape)


def _used(target, weight, ignore, dtype):
    """Return the targets (0 where ignored), a mask of the ignored ones, and the weight of each."""
    used = aten.ne.Scalar(target, ignore)
    target = aten.mul.Tensor(target, used)
    counted = _like(used, dtype)
    return (
        target,
        aten.logical_not.default(used),
        counted if weight is None else aten.mul.Tensor(aten.index.Tensor(weight, [target]), counted),
    )


def nll_loss(scores, target, weight, reduction, ignore):
    """``-Σ w · scores[target]``, and ``Σ w``."""
    dim = min(scores.dim() - 1, 1)
    target, ignored, counted = _used(target, weight, ignore, scores.dtype)
    chosen = aten.squeeze.dims(gather(scores, dim, aten.unsqueeze.default(target, dim)), [dim])
    loss = aten.neg.default(aten.mul.Tensor(aten.masked_fill.Scalar(chosen, ignored, 0), counted))
    if reduction != SUM:
        return loss, aten.full.default([], 0, dtype=scores.dtype, device=scores.device)
    return aten.sum.default(loss), aten.sum.default(counted)


def nll_loss_backward(gradient, scores, target, weight, reduction, ignore, total):
    dim = min(scores.dim() - 1, 1)
    target, ignored, counted = _used(target, weight, ignore, scores.dtype)
    # masked, because the mean of no target is NaN
    each = aten.masked_fill.Scalar(aten.neg.default(aten.mul.Tensor(counted, gradient)), ignored, 0)
    each = aten.unsqueeze.default(each, dim)
    count = scores.shape[dim]
    return sharded_lookup.scatter_held(each, dim, aten.unsqueeze.default(target, dim), _places(count, target), count)


def causal_attention(query, key, value, dropout=0.0, causal=False, *, attn_mask=None, scale=None):
    return sharded_lookup.causal_attention(query, key, value, _places(query.shape[-2], query), scale)


def causal_attention_backward(
    gradient, query, key, value, out, logsumexp, dropout, causal, *, attn_mask=None, scale=None
):
    return sharded_lookup.causal_attention_backward(
        gradient, query, key, value, out, logsumexp, _places(query.shape[-2], query), scale
    )


def _is_causal(position):
    return lambda *args, attn_mask=None, **_: len(args) > position and args[position] is True and attn_mask is None


def _argument(position):
    return lambda *args, **_: args[position]


def _fixed(dim):
    return lambda *args, **_: dim


def _classes(position):
    return lambda *args, **_: min(len(args[position].shape) - 1, 1)


EXPANSIONS: dict[Any, Expansion] = {
    op: Expansion(*row)
    for name, *row in (
        ("_softmax", softmax, _argument(1), 0, 8),
        ("_log_softmax", log_softmax, _argument(1), 0, 8),
        ("_softmax_backward_data", softmax_backward, _argument(2), 0, 8),
        ("_log_softmax_backward_data", log_softmax_backward, _argument(2), 0, 8),
        ("embedding", embedding, _fixed(0)),
        ("embedding_dense_backward", embedding_backward, _fixed(0), -1, 1, lambda *args: not args[4]),
        ("gather", gather, _argument(1), 0, 8, _of_all_others),
        ("scatter_add", scatter_add, _argument(1), 0, 8, _of_all_others),
        ("nll_loss_forward", nll_loss, _classes(0)),
        ("nll_loss2d_forward", nll_loss, _classes(0)),
        ("nll_loss_backward", nll_loss_backward, _classes(1), 1),
        ("nll_loss2d_backward", nll_loss_backward, _classes(1), 1),
        ("_scaled_dot_product_flash_attention_for_cpu", causal_attention, _fixed(2), 0, 1, _is_causal(4)),
        (
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            causal_attention_backward,
            _fixed(2),
            1,
            1,
            _is_causal(7),
        ),
    )
    if (op := op_named(name))
}


def opened_factors(node: fx.Node) -> tuple[tuple[str, int], ...]:
    """Return the factors that a node's op needs whole only as long as it is not expanded.

    Each comes with the fewest elements that it should have.
    """
    row = EXPANSIONS.get(node.target)
    if row is None:
        return ()
    args, kwargs = [typed(a) for a in node.args], {key: typed(value) for key, value in node.kwargs.items()}
    return row.opened(bind_node(node), args, kwargs)
