"""The transfers on real processes: functional collectives that are started, and waited for at the first use.

Each transfer that exchanges data is a pair of functions on one rank's piece. ``start_…`` brings the piece into the form
that the collective takes and begins it; ``finish_…`` waits and brings what came into the form of the result. In between
the program goes on. The collectives are torch's own, native on gloo and NCCL: nothing is gathered in order to be reduced
or exchanged. Pieces of unequal sizes are padded to the largest, but for an all-to-all, which takes them as they are.

``view`` is the shape in which dims count: the piece's own, with merged dims taken apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar import transfers
from autopar.torch_private import FUNCTIONAL

Shape = Sequence[int]

REDUCE = {"sum": "sum", "avg": "avg", "max": "max", "min": "min", "prod": "product"}  # ours → of torch.distributed


@dataclass(frozen=True)
class Exchange:
    """What a transfer comes to on one rank: two functions, with their arguments after the tensor."""

    start: Callable[..., torch.Tensor]
    started: tuple[Any, ...]
    finish: Callable[..., torch.Tensor]
    finished: tuple[Any, ...] = ()


def wait(started: torch.Tensor) -> torch.Tensor:
    """The result of a collective, usable on this rank."""
    return FUNCTIONAL.wait_tensor(started)


def start_all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return FUNCTIONAL.all_reduce(x.contiguous(), op, group)


def start_all_reduce_in_place(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """For an operand that nobody reads again: there is no second buffer."""
    return FUNCTIONAL.all_reduce_(x.contiguous(), op, group)


def start_all_gather(x: torch.Tensor, view: Shape, dim: int, sizes: Shape, group: str) -> torch.Tensor:
    piece = _padded(x.reshape(view), dim, max(sizes)).contiguous()
    return FUNCTIONAL.all_gather_into_tensor(piece.unsqueeze(0), len(sizes), group)


def finish_all_gather(started: torch.Tensor, shape: Shape, dim: int, sizes: Shape) -> torch.Tensor:
    pieces = wait(started)  # [ranks, *piece]
    if dim == 0 and len(set(sizes)) == 1:
        return pieces.reshape(shape)
    return torch.cat([p.narrow(dim, 0, n) for p, n in zip(pieces.unbind(), sizes, strict=True)], dim).reshape(shape)


def start_reduce_scatter(x: torch.Tensor, view: Shape, dim: int, sizes: Shape, op: str, group: str) -> torch.Tensor:
    x = x.reshape(view)
    if dim == 0 and len(set(sizes)) == 1:
        pieces = x.reshape(len(sizes), sizes[0], *view[1:]).contiguous()
    else:
        pieces = torch.stack([_padded(piece, dim, max(sizes)) for piece in x.split(list(sizes), dim)])
    return FUNCTIONAL.reduce_scatter_tensor(pieces, op, len(sizes), group)


def finish_reduce_scatter(started: torch.Tensor, shape: Shape, dim: int, own: int) -> torch.Tensor:
    piece = wait(started).squeeze(0)
    return piece.narrow(dim, 0, own).reshape(shape).contiguous()


def start_all_to_all(x: torch.Tensor, view: Shape, target: int, new_sizes: Shape, received: Shape, group: str) -> torch.Tensor:
    pieces = [piece.reshape(-1) for piece in x.reshape(view).split(list(new_sizes), target)]
    sent = [piece.numel() for piece in pieces]
    flat = torch.cat(pieces)
    if not x.is_complex():  # which no backend exchanges
        return FUNCTIONAL.all_to_all_single(flat, list(received), sent, group)
    return FUNCTIONAL.all_to_all_single(torch.view_as_real(flat), list(received), sent, group)


def finish_all_to_all(started: torch.Tensor, shape: Shape, source: int, pieces: Sequence[Shape], complex: bool) -> torch.Tensor:
    flat = wait(started)
    flat = torch.view_as_complex(flat) if complex else flat
    columns = flat.split([math.prod(piece) for piece in pieces])
    return torch.cat([c.reshape(piece) for c, piece in zip(columns, pieces, strict=True)], source).reshape(shape)


def _padded(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """``x`` with zeros behind it, up to ``size``."""
    if x.shape[dim] == size:
        return x
    return torch.cat([x, x.new_zeros([size - n if d == dim else n for d, n in enumerate(x.shape)])], dim)


# -- from a transfer of a local program -------------------------------------------------------------------------------


def exchange(function: Callable[..., Any], given: Mapping[str, Any], piece: Shape, result: Shape, dtype: torch.dtype,
             own: int, group: str) -> Exchange:  # fmt: skip
    """The collective of a transfer.

    Args:
        function, given: the transfer and its arguments by name, with explicit sizes, as in a local program.
        piece, result: the shapes of operand and result on this rank.
        own: this rank's index along the axis.
        group: the name of the process group.
    """
    view = tuple(n for dim in given["parts"] for n in dim) if given.get("parts") else tuple(piece)
    dim, sizes = given.get("dim"), tuple(given.get("sizes") or ())
    op = REDUCE[given.get("op", "sum")]
    shape = tuple(result)
    if function is transfers.all_reduce:
        return Exchange(start_all_reduce, (op, group), wait)
    if function is transfers.all_gather:
        return Exchange(start_all_gather, (view, dim, sizes, group), finish_all_gather, (shape, dim, sizes))
    if function is transfers.reduce_scatter:
        return Exchange(start_reduce_scatter, (view, dim, sizes, op, group), finish_reduce_scatter, (shape, dim, sizes[own]))
    assert function is transfers.all_to_all, function
    source, target, new_sizes = given["source"], given["target"], tuple(given["new_sizes"])
    mine = {target: new_sizes[own]}
    pieces = tuple(tuple({**mine, source: size}.get(d, n) for d, n in enumerate(view)) for size in sizes)
    received = tuple(math.prod(piece) for piece in pieces)
    return Exchange(start_all_to_all, (view, target, new_sizes, received, group), finish_all_to_all,
                    (shape, source, pieces, dtype.is_complex))  # fmt: skip
