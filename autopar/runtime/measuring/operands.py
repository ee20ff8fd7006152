"""Make the operands of one call of a local program: tensors with the shapes, dtypes and strides of its pieces.

Floats are between 0.5 and 1.5, where logarithms, roots and divisions are ordinary numbers. Integers that look something
up are below the size of what they look up. A view is made as the program makes it, so that its elements lie as they
would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar.costs.calls import lies_by_sequence, viewed, views_behind
from autopar.ir.nodes import called_op, element_of, is_getitem, map_operands, operands, record_of, tensor_type
from autopar.ir.record import TensorType
from autopar.rules.registry import rule_of
from autopar.runtime.simulation.simulate import ANY_STRIDES
from autopar.torch_private import OpOverload

ANY = 2  # integers below it are right for all ops that look nothing up


def _rows(node: fx.Node) -> int:
    return _size(node.args[0], 0)


def _classes(scores: int) -> Callable[[fx.Node], int]:
    """Return a limit: the classes of scores, ``[classes]`` or ``[batch, classes, …]``, which are this argument."""

    def limit(node: fx.Node) -> int:
        return _size(node.args[scores], -1 if len(_shape(node.args[scores])) == 1 else 1)

    return limit


def _argument(position: int) -> Callable[[fx.Node], int]:
    def limit(node: fx.Node) -> int:
        size = node.args[position]
        assert isinstance(size, int)
        return size

    return limit


def _along_dim(node: fx.Node) -> int:
    dim = node.args[1]
    assert isinstance(dim, int)
    return _size(node.args[0], dim)


def _indexed(node: fx.Node) -> int:
    """Return the smallest of the indexed dims: of some, the first ones that have an index."""
    indices = node.args[1]
    assert isinstance(indices, (list, tuple))
    return min((_size(node.args[0], d) for d, index in enumerate(indices) if index is not None), default=ANY)


# op → the number that its integers are below
LIMITS: dict[str, Callable[[fx.Node], int]] = {
    "embedding": _rows,
    "embedding_dense_backward": _argument(2),
    "autopar::look_up": _argument(3),
    "autopar::look_up_backward": _argument(3),
    "autopar::within": _argument(1),
    "autopar::assumed": lambda node: 1,
    "autopar::gather_held": _argument(4),
    "autopar::scatter_held": _argument(4),
    **dict.fromkeys(
        ("index_select", "index_add", "gather", "scatter.value", "scatter.src", "scatter_add"), _along_dim
    ),
    **dict.fromkeys(("index.Tensor", "index_put"), _indexed),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss"), _classes(0)),
    **dict.fromkeys(
        ("nll_loss_backward", "nll_loss2d_backward", "multi_margin_loss_backward"), _classes(1)
    ),
}  # fmt: skip

# op → the argument that lists the indices which the rank holds, in ascending order
HELD = {
    "autopar::look_up": 2, "autopar::look_up_backward": 2, "autopar::gather_held": 3, "autopar::scatter_held": 3,
    "autopar::causal_attention": 3, "autopar::causal_attention_backward": 6,
}  # fmt: skip


class Operands:
    """Makes tensors on a device; they are the same in every process.

    Args:
        device: of the tensors.

    Attributes:
        bytes: of all tensors that were drawn so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._random = device, torch.Generator(device).manual_seed(0)
        self.bytes = 0

    def of_call(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with tensors in the place of values; equal operands are one tensor."""
        made: dict[fx.Node, torch.Tensor] = {}
        below, held = ANY, None
        if isinstance(node.target, OpOverload):
            op = rule_of(node.target).op
            below, held = max(LIMITS[op](node), 1) if op in LIMITS else ANY, node.args[HELD[op]] if op in HELD else None

        def tensor(value: fx.Node) -> torch.Tensor:
            if value not in made:
                made[value] = self._ascending(value) if value is held else self.of_value(value, below)
            return made[value]

        return map_operands(node.args, tensor), map_operands(dict(node.kwargs), tensor)

    def of_value(self, value: fx.Node, below: int = ANY) -> torch.Tensor:
        """Return a tensor in the place of a value; integers are below a number."""
        if views_behind(value):
            op = operands(value)[0] if is_getitem(value) else value
            base = self.of_value(viewed(value), below)
            args, kwargs = map_operands((op.args, dict(op.kwargs)), lambda _: base)
            made = ANY_STRIDES.get(called_op(op), called_op(op))(*args, **kwargs)
            return made[element_of(value)[1]] if is_getitem(value) else made
        type = tensor_type(value)
        if lies_by_sequence(value):
            b, heads, sequence, width = type.shape
            return self.drawn(TensorType((b, sequence, heads, width), type.dtype), below).transpose(1, 2)
        return self.drawn(type, below)

    def drawn(self, type: TensorType, below: int = ANY) -> torch.Tensor:
        """Return random numbers of a shape and dtype, in order."""
        self.bytes += math.prod(type.shape) * type.dtype.itemsize
        dtype, options = type.dtype, {"generator": self._random, "device": self.device}
        if dtype.is_complex:
            return torch.randn(type.shape, dtype=dtype, **options)  # type: ignore[call-overload]
        if not dtype.is_floating_point:
            return torch.randint(2 if dtype == torch.bool else below, type.shape, **options).to(dtype)  # type: ignore[call-overload]
        wide = dtype if dtype.itemsize > 1 else torch.float32
        return torch.rand(type.shape, dtype=wide, **options).add_(0.5).to(dtype)  # type: ignore[call-overload]

    def _ascending(self, value: fx.Node) -> torch.Tensor:
        type = record_of(value).type
        assert isinstance(type, TensorType)
        return torch.arange(type.shape[0], dtype=type.dtype, device=self.device)


def _shape(value: Any) -> Sequence[int]:
    assert isinstance(value, fx.Node)
    return tensor_type(value).shape


def _size(value: Any, dim: int) -> int:
    shape = _shape(value)
    return shape[dim] if shape else 1
