"""Split this rank's part of a tensor into boxes of the whole tensor, which a save writes and a load fills.

A DTensor with torch's public placements is one box. A DTensor with a merged dim, such as ``(3 4096/tp)`` of a fused qkv
weight, has several: one for each run of indices. A box is read and written in stretches of a few MiB.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import distributed

from autopar.ir.boxes import box_of, slices_of
from autopar.ir.dtensor import layout_of_dtensor
from autopar.model.dtensor_parameters import local_of
from autopar.runtime.dtensors import is_dtensor

STRETCH = 4 * 2**20  # bytes that are read or written at once: a save or a load needs no more memory
ROW = 2**16  # bytes; a shorter row is read whole even if only a part is needed

Place = tuple[int, ...]


class Piece(NamedTuple):
    """A box of a tensor that this rank holds.

    Attributes:
        start: the index in the whole tensor at which it begins.
        data: its elements, a view of the tensor's memory.
    """

    start: Place
    data: torch.Tensor


def pieces_of(name: str, tensor: torch.Tensor) -> list[Piece]:
    """Return the pieces of a tensor on this rank; none is empty, unless the tensor is.

    Raises:
        ValueError: the tensor is a partial sum, or has placements that autopar does not know; or its piece has another
            size.
    """
    if not is_dtensor(tensor):
        return [Piece((0,) * tensor.dim(), tensor.detach())]
    shape = tuple(tensor.shape)
    try:
        layout = layout_of_dtensor(tensor)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if pending := layout.attr.pending:
        raise ValueError(
            f"{name} is pending over {', '.join(axis for axis, _ in pending)}, and has no values yet; reduce it first"
        )
    rank = distributed.get_rank()
    if rank not in layout.mesh:
        return []
    local = local_of(tensor)
    if 0 in shape:
        return [Piece((0,) * len(shape), local.new_empty(shape))]
    box = box_of(layout, shape, rank)
    box_shape = tuple(sum(stop - start for start, stop in runs) for runs in box)
    if box_shape != tuple(local.shape):
        raise ValueError(
            f"{name} of {list(shape)} has a piece of {list(local.shape)} on rank {rank}, where its placements say "
            f"{list(box_shape)}; cut it with distribute_tensor"
        )
    return [Piece(tuple(run.start for run in in_whole), local[in_piece]) for in_whole, in_piece in slices_of(box)]


class Stretch(NamedTuple):
    """A contiguous range of a stored box in its file, and the part of it that is needed.

    Attributes:
        first: the position of its first element among the elements of the box, in row-major order.
        sizes: its shape; their product is the number of elements.
        wanted: the part that is needed, as slices of this shape.
        target: the slices of the target that this part fills.
    """

    first: int
    sizes: Place
    wanted: tuple[slice, ...]
    target: tuple[slice, ...]


def stretches(sizes: Place, start: Place, lengths: Place, width: int) -> Iterator[Stretch]:
    """Yield the stretches of a stored box of ``sizes`` that cover the part of it at ``start``, of ``lengths``.

    Each is at most ``STRETCH`` bytes, or one element; ``width``: bytes of an element. A short row is read whole even if
    only a part of it is needed.
    """
    if 0 in lengths:
        return
    if not sizes:
        yield Stretch(0, (), (), ())
        return
    row, whole = math.prod(sizes[1:]), lengths[1:] == sizes[1:]
    if row * width <= (STRETCH if whole else ROW) or len(sizes) == 1:
        rows = max(1, STRETCH // (row * width))
        inner = tuple(slice(s, s + n) for s, n in zip(start[1:], lengths[1:], strict=True))
        for k in range(0, lengths[0], rows):
            count = min(rows, lengths[0] - k)
            yield Stretch(
                (start[0] + k) * row,
                (count, *sizes[1:]),
                (slice(0, count), *inner),
                (slice(k, k + count), *(slice(0, n) for n in lengths[1:])),
            )
        return
    for k in range(lengths[0]):
        for inner_stretch in stretches(sizes[1:], start[1:], lengths[1:], width):
            first = (start[0] + k) * row + inner_stretch.first
            yield Stretch(
                first,
                (1, *inner_stretch.sizes),
                (slice(0, 1), *inner_stretch.wanted),
                (slice(k, k + 1), *inner_stretch.target),
            )
