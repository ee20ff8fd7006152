"""The pieces of a tensor that this rank holds, as boxes of the whole: what is written, and what is filled.

A DTensor whose placements are public is one box. One of a merged dim, a fused qkv weight's ``(3 4096/tp)``, is several: one
for each run of indices. Stretches are how a box lies in a file, a few MiB at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import distributed

from autopar.ir.boxes import box_of
from autopar.ir.dtensor import attr_of
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.model.dtensor_parameters import is_dtensor, local_of

STRETCH = 4 * 2**20  # bytes that are read or written at once: all the memory that a save or a load needs
ROW = 2**16  # bytes that are read whole where only some are wanted

Place = tuple[int, ...]


class Piece(NamedTuple):
    """A box of a tensor that this rank holds.

    Attributes:
        start: where it begins in the whole tensor.
        data: its elements, a view of the tensor's own memory.
    """

    start: Place
    data: torch.Tensor


def pieces_of(name: str, tensor: torch.Tensor) -> list[Piece]:
    """The pieces on this rank, none of them empty, unless the tensor is.

    Raises:
        ValueError: the tensor is pending, or lies as no placements of ours say; or its piece has another size.
    """
    if not is_dtensor(tensor):
        return [Piece((0,) * tensor.dim(), tensor.detach())]
    device_mesh, shape = tensor.device_mesh, tuple(tensor.shape)  # type: ignore[attr-defined]
    mesh = Mesh(dict(zip(_names(device_mesh), device_mesh.shape, strict=True)), ranks=device_mesh.mesh.flatten().tolist())
    try:
        attr = attr_of(tensor.placements, mesh, shape)  # type: ignore[attr-defined]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if attr.pending:
        raise ValueError(f"{name} is pending over {', '.join(axis for axis, _ in attr.pending)}, and has no values yet; reduce it first")
    rank = distributed.get_rank()
    if rank not in mesh.ranks:
        return []
    local = local_of(tensor)
    if 0 in shape:
        return [Piece((0,) * len(shape), local.new_empty(shape))]
    box = box_of(Layout(mesh, attr), shape, rank)
    held = tuple(sum(stop - start for start, stop in runs) for runs in box)
    if held != tuple(local.shape):
        raise ValueError(f"{name} of {list(shape)} has a piece of {list(local.shape)} on rank {rank}, where its placements say {list(held)}; cut it with distribute_tensor")
    pieces = []
    for runs in itertools.product(*(zip(runs, _begins(runs), strict=True) for runs in box)):
        data = local[tuple(slice(begin, begin + stop - start) for (start, stop), begin in runs)] if runs else local
        pieces.append(Piece(tuple(start for (start, _), _ in runs), data))
    return pieces


def _names(device_mesh: distributed.DeviceMesh) -> tuple[str, ...]:
    names = device_mesh.mesh_dim_names or ()
    return names if names and all(map(str.isidentifier, names)) else tuple(f"axis{k}" for k in range(device_mesh.ndim))


def _begins(runs: Sequence[tuple[int, int]]) -> list[int]:
    """Where each run begins among the indices that are held."""
    return [0, *itertools.accumulate(stop - start for start, stop in runs)][: len(runs)]


class Stretch(NamedTuple):
    """Elements of a stored box that lie together in the file, and what of them is wanted.

    Attributes:
        first: of the elements of the box, in row-major order.
        sizes: of the elements; their product is their number.
        wanted: which of them.
        target: where the wanted ones belong in what is filled.
    """

    first: int
    sizes: Place
    wanted: tuple[slice, ...]
    target: tuple[slice, ...]


def stretches(sizes: Place, start: Place, lengths: Place, width: int) -> Iterator[Stretch]:
    """The stretches of a stored box of ``sizes`` that hold the part of it at ``start``, of ``lengths``.

    Each is at most ``STRETCH`` bytes, or one element; ``width``: bytes of an element. Rows of which a part is wanted are
    read whole where they are short.
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
            yield Stretch((start[0] + k) * row, (count, *sizes[1:]), (slice(0, count), *inner), (slice(k, k + count), *(slice(0, n) for n in lengths[1:])))
        return
    for k in range(lengths[0]):
        for one in stretches(sizes[1:], start[1:], lengths[1:], width):
            first = (start[0] + k) * row + one.first
            yield Stretch(first, (1, *one.sizes), (slice(0, 1), *one.wanted), (slice(k, k + 1), *one.target))
