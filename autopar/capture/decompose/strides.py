"""``as_strided``, taken apart: a place in memory becomes an index into the flattened tensor.

On a rank a piece lies in memory in another way than the tensor does on one device. So what is read by strides is read by
indices: a view where all elements are taken once, else a look-up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autopar.errors import CaptureError

aten = torch.ops.aten


def _order(size: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dims from the one with the longest stride; those of size one last."""
    return sorted(range(len(size)), key=lambda d: (size[d] == 1, -stride[d]))


def _is_dense(size: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    return all(size[d] == 1 or stride[d] == math.prod(size[e] for e in order[k + 1 :]) for k, d in enumerate(order))


def _flat(x: Any) -> tuple[Any, list[int]]:
    """The elements in the order in which they lie in memory, and the dims in that order."""
    order = _order(x.shape, x.stride())
    if not _is_dense(x.shape, x.stride(), order):
        raise CaptureError(
            f"as_strided of a tensor with gaps in its memory: shape {list(x.shape)}, strides {list(x.stride())}\n  take it of x.contiguous()"
        )
    sorted_ = x if order == list(range(x.dim())) else aten.permute.default(x, order)
    return aten.view.default(sorted_, [x.numel()]), order


def _back(flat: Any, size: Sequence[int], order: Sequence[int]) -> Any:
    """Elements that lie in the order of ``order``, as a tensor of ``size``."""
    sorted_ = aten.view.default(flat, [size[d] for d in order])
    return sorted_ if list(order) == list(range(len(size))) else aten.permute.default(sorted_, [order.index(d) for d in range(len(size))])


def _start(x: Any, size: Sequence[int], stride: Sequence[int], offset: int | None) -> int:
    """The first place, from the tensor's own first."""
    start = 0 if offset is None else offset - x.storage_offset()
    last = start + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if math.prod(size) and not 0 <= start <= last < x.numel():
        raise CaptureError(
            f"as_strided reads the places {start} to {last} of a tensor with {x.numel()} elements, those of the tensor it is a part of\n"
            f"  take it of that tensor"
        )
    return start


def _places(x: Any, size: Sequence[int], stride: Sequence[int], start: int) -> Any:
    """The index into the flattened tensor of each element, flattened too."""
    total = aten.full.default(list(size), start, dtype=torch.int64, device=x.device)
    for d, (n, s) in enumerate(zip(size, stride, strict=True)):
        along = aten.mul.Scalar(aten.arange.default(n, device=x.device), s)
        total = aten.add.Tensor(total, aten.view.default(along, [n if e == d else 1 for e in range(len(size))]))
    return aten.view.default(total, [math.prod(size)])


def as_strided(x, size, stride, offset=None):
    """A view where every element is taken once; else a look-up."""
    start, (flat, _), order = _start(x, size, stride, offset), _flat(x), _order(size, stride)
    if math.prod(size) == x.numel() and _is_dense(size, stride, order):
        return _back(flat, size, order)
    return aten.view.default(aten.index_select.default(flat, 0, _places(x, size, stride, start)), list(size))


def as_strided_scatter(x, source, size, stride, offset=None):
    """``x`` with ``source`` written to these places."""
    start, (flat, order) = _start(x, size, stride, offset), _flat(x)
    given = aten.view.default(aten.clone.default(source, memory_format=torch.contiguous_format), [source.numel()])
    return _back(aten.index_put.default(flat, [_places(x, size, stride, start)], given), x.shape, order)


STRIDES = {
    aten.as_strided.default: as_strided,
    aten.as_strided_copy.default: as_strided,
    aten.as_strided_scatter.default: as_strided_scatter,
}
