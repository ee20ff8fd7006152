"""Decompose ``as_strided``: an address in memory becomes an index into the flattened tensor.

A piece on a rank has another memory layout than the tensor has on one device. So elements are addressed by indices and
not by strides: by a view if every element is taken once, and else by a look-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.errors import CaptureError
from autopar.torch_private import aten, present


def _order(size: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Return the dims by descending stride; dims of size one come last."""
    return sorted(range(len(size)), key=lambda d: (size[d] == 1, -stride[d]))


def _is_dense(size: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    return all(size[d] == 1 or stride[d] == math.prod(size[e] for e in order[k + 1 :]) for k, d in enumerate(order))


def _flat(x: Any) -> tuple[Any, list[int]]:
    """Return the elements in memory order, flat, and the dims in that order."""
    order = _order(x.shape, x.stride())
    if not _is_dense(x.shape, x.stride(), order):
        raise CaptureError(
            f"as_strided of a tensor with gaps in its memory: shape {list(x.shape)}, strides {list(x.stride())}\n  "
            f"take it of x.contiguous()"
        )
    sorted_ = x if order == list(range(x.dim())) else aten.permute.default(x, order)
    return aten.view.default(sorted_, [x.numel()]), order


def _back(flat: Any, size: Sequence[int], order: Sequence[int]) -> Any:
    """Reshape flat elements, whose dims are in the order ``order``, to a tensor of ``size``."""
    sorted_ = aten.view.default(flat, [size[d] for d in order])
    return (
        sorted_
        if list(order) == list(range(len(size)))
        else aten.permute.default(sorted_, [order.index(d) for d in range(len(size))])
    )


def _start(x: Any, size: Sequence[int], stride: Sequence[int], offset: int | None) -> int:
    """Return the index of the first element, relative to the tensor's own first element."""
    start = 0 if offset is None else offset - x.storage_offset()
    last = start + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if math.prod(size) and not 0 <= start <= last < x.numel():
        raise CaptureError(
            f"as_strided reads the places {start} to {last} of a tensor with {x.numel()} elements, those of the "
            f"tensor it is a part of\n"
            f"  take it of that tensor"
        )
    return start


def _places(x: Any, size: Sequence[int], stride: Sequence[int], start: int) -> Any:
    """Return, flat, the index of each element in the flattened tensor."""
    total = aten.full.default(list(size), start, dtype=torch.int64, device=x.device)
    for d, (n, s) in enumerate(zip(size, stride, strict=True)):
        along = aten.mul.Scalar(aten.arange.default(n, device=x.device), s)
        total = aten.add.Tensor(total, aten.view.default(along, [n if e == d else 1 for e in range(len(size))]))
    return aten.view.default(total, [math.prod(size)])


def as_strided(x, size, stride, offset=None):
    """``as_strided`` by a view if every element is taken once, and else by a look-up."""
    start, (flat, _), order = _start(x, size, stride, offset), _flat(x), _order(size, stride)
    if math.prod(size) == x.numel() and _is_dense(size, stride, order):
        return _back(flat, size, order)
    return aten.view.default(aten.index_select.default(flat, 0, _places(x, size, stride, start)), list(size))


def as_strided_scatter(x, source, size, stride, offset=None):
    """Return ``x`` with ``source`` written to the strided elements."""
    start, (flat, order) = _start(x, size, stride, offset), _flat(x)
    flat_source = aten.view.default(aten.clone.default(source, memory_format=torch.contiguous_format), [source.numel()])
    return _back(aten.index_put.default(flat, [_places(x, size, stride, start)], flat_source), x.shape, order)


STRIDES: dict[Any, Callable[..., Any]] = present(
    {
        aten.as_strided.default: as_strided,
        aten.as_strided_copy.default: as_strided,
        aten.as_strided_scatter.default: as_strided_scatter,
    }
)
