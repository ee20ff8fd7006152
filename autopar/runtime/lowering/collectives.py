"""The transfers on real processes: functional collectives that are started, and waited for at the first use.

Each transfer that exchanges data is a pair of functions on one rank's piece. ``start_…`` brings the piece into the form
that the collective takes and begins it; ``finish_…`` waits and brings what came into the form of the result. In between
the program goes on. The collectives are torch's own, native on gloo and NCCL: nothing is gathered in order to be reduced
or exchanged. Pieces of unequal sizes are padded to the largest, but for an all-to-all, which takes them as they are.

``view`` is the shape in which dims count: the piece's own, with merged dims taken apart.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from autopar.ir import transfers
from autopar.runtime.lowering.packing import Packing, Places, as_bytes, from_bytes, new_piece, size_of, take
from autopar.runtime.lowering.reduction import Calls, Reduction, is_gathered
from autopar.torch_private import FUNCTIONAL, start_gather

Shape = Sequence[int]

CARRIERS = {  # dtypes that no backend moves → others of their width, for what is only copied
    torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8, torch.int16: torch.float16,
    torch.uint16: torch.float16, torch.uint32: torch.int32, torch.uint64: torch.int64,
}  # fmt: skip
PADDING = 1.05  # how much more than the pieces an exchange of padded ones may send


@dataclass(frozen=True)
class Exchange:
    """What a transfer comes to on one rank: two functions, with their arguments after the tensor.

    ``before`` is called on the tensor before it is sent, and ``after`` on what comes: the dtype of a reduction, or an average's division.
    """

    start: Callable[..., torch.Tensor]
    started: tuple[Any, ...]
    finish: Callable[..., torch.Tensor]
    finished: tuple[Any, ...] = ()
    before: Calls = ()
    after: Calls = ()


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
    return start_gather(carried(piece).unsqueeze(0), len(sizes), group)


def finish_all_gather(started: torch.Tensor, shape: Shape, dim: int, sizes: Shape, dtype: torch.dtype) -> torch.Tensor:
    pieces = wait(started).view(dtype)  # [ranks, *piece]
    if dim == 0 and len(set(sizes)) == 1:
        return pieces.reshape(shape)
    return torch.cat([p.narrow(dim, 0, n) for p, n in zip(pieces.unbind(), sizes, strict=True)], dim).reshape(shape)


def start_uneven_all_gather(x: torch.Tensor, ranks: int, received: Shape, group: str) -> torch.Tensor:
    """Pieces that padding would make much larger: each rank sends its own to each other."""
    flat = as_bytes(x)
    return FUNCTIONAL.all_to_all_single(flat.repeat(ranks), list(received), [flat.numel()] * ranks, group)


def finish_uneven_all_gather(started: torch.Tensor, shape: Shape, dim: int, received: Shape, pieces: Sequence[Shape], dtype: torch.dtype) -> torch.Tensor:
    flat = wait(started).split(list(received))
    return torch.cat([from_bytes(c, dtype).reshape(piece) for c, piece in zip(flat, pieces, strict=True)], dim).reshape(shape)


def start_redistribute(x: torch.Tensor, sends: Sequence[Places | None], received: Shape, group: str) -> torch.Tensor:
    """To each rank of the group the box that it lacks, and nothing to most."""
    boxes = [x.new_empty(0) if places is None else take(x, places).reshape(-1) for places in sends]
    flat = as_bytes(torch.cat(boxes))
    width = x.element_size()
    return FUNCTIONAL.all_to_all_single(flat, list(received), [box.numel() * width for box in boxes], group)


def finish_redistribute(started: torch.Tensor, x: torch.Tensor, plan: Packing, received: Shape) -> torch.Tensor:
    boxes = [from_bytes(box, x.dtype) for box in wait(started).split([n for n in received if n])]
    return new_piece(plan, x.dtype, x.device, x, boxes)


def relaid_here(x: torch.Tensor, plan: Packing) -> torch.Tensor:
    """A redistribute in which nothing travels."""
    return new_piece(plan, x.dtype, x.device, x, [])


def exchange_between_stages(x: torch.Tensor | None, plan: Packing, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Send and receive point to point; all is under way at once. The own piece where the rank only sends.

    Plain sends, which are waited for here: those of torch's functional collectives are never freed.
    """
    received = [torch.empty(size_of(places) * dtype.itemsize, dtype=torch.uint8, device=device) for _, places in plan.receives]
    operations = []
    for is_send, k in plan.order:
        if is_send:
            assert x is not None
            other, places = plan.sends[k]
            operations.append(distributed.P2POp(distributed.isend, as_bytes(take(x, places)), other))
        else:
            operations.append(distributed.P2POp(distributed.irecv, received[k], plan.receives[k][0]))
    for work in distributed.batch_isend_irecv(operations) if operations else ():
        work.wait()
    if plan.shape is None:
        assert x is not None
        return x
    return new_piece(plan, dtype, device, x, [from_bytes(box, dtype) for box in received])


def start_reduce_scatter(x: torch.Tensor, view: Shape, dim: int, sizes: Shape, op: str, group: str) -> torch.Tensor:
    pieces = x.reshape(view).split(list(sizes), dim)
    return start_scatter(torch.stack([_padded(piece, dim, max(sizes)) for piece in pieces]), op, group)


def finish_reduce_scatter(started: torch.Tensor, shape: Shape, dim: int, own: int, rank: int) -> torch.Tensor:
    return own_row(started, rank).narrow(dim, 0, own).reshape(shape).contiguous()


def start_scatter(rows: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """``[ranks, …]``: each rank gets the sum of one row. ``rows`` may be written to.

    On CPU an all-reduce: gloo's reduce-scatter is one too, of a copy, and takes more than twice as long (8 MB on two ranks: 2.8 and 6.4 ms
    with torch 2.13).
    """
    if rows.is_cpu:
        return FUNCTIONAL.all_reduce_(rows, op, group)
    return FUNCTIONAL.reduce_scatter_tensor(rows, op, len(rows), group)


def own_row(started: torch.Tensor, rank: int) -> torch.Tensor:
    """What ``start_scatter`` brings to one rank of the group, in memory of its own."""
    rows = wait(started)
    return rows[rank].clone() if len(rows) > 1 else rows[0]


def start_product(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """Gather the factors of all ranks."""
    return start_gather(x.resolve_conj().contiguous().unsqueeze(0), ranks, group)


def finish_product(started: torch.Tensor) -> torch.Tensor:
    """In the order of the ranks, so that all have the same bits."""
    return functools.reduce(torch.mul, wait(started).unbind())


def finish_scattered_product(started: torch.Tensor, view: Shape, dim: int, sizes: Shape, own: int, shape: Shape) -> torch.Tensor:
    return finish_product(started).reshape(view).narrow(dim, sum(sizes[:own]), sizes[own]).reshape(shape).contiguous()


def start_all_to_all(x: torch.Tensor, view: Shape, target: int, new_sizes: Shape, received: Shape, group: str) -> torch.Tensor:
    pieces = [piece.reshape(-1) for piece in x.reshape(view).split(list(new_sizes), target)]
    sent = [piece.numel() for piece in pieces]
    flat = torch.cat(pieces)
    if not x.is_complex():  # which no backend exchanges
        return FUNCTIONAL.all_to_all_single(carried(flat), list(received), sent, group)
    return FUNCTIONAL.all_to_all_single(torch.view_as_real(flat), list(received), sent, group)


def finish_all_to_all(started: torch.Tensor, shape: Shape, source: int, pieces: Sequence[Shape], dtype: torch.dtype) -> torch.Tensor:
    flat = wait(started)
    flat = torch.view_as_complex(flat) if dtype.is_complex else flat.view(dtype)
    columns = flat.split([math.prod(piece) for piece in pieces])
    return torch.cat([c.reshape(piece) for c, piece in zip(columns, pieces, strict=True)], source).reshape(shape)


def carried(x: torch.Tensor) -> torch.Tensor:
    """The same bits, of the same shape, in a dtype that backends move."""
    return x.resolve_conj().view(CARRIERS.get(x.dtype, x.dtype))


def _padded(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """``x`` with zeros behind it, up to ``size``."""
    if x.shape[dim] == size:
        return x
    return torch.cat([x, x.new_zeros([size - n if d == dim else n for d, n in enumerate(x.shape)])], dim)


# -- from a transfer of a local program -------------------------------------------------------------------------------


def exchange(function: Callable[..., Any], given: Mapping[str, Any], piece: Shape, result: Shape, dtype: torch.dtype,
             own: int, ranks: int, group: str) -> Exchange:  # fmt: skip
    """The collective of a transfer.

    Args:
        function, given: the transfer and its arguments by name, with explicit sizes, as in a local program.
        piece, result: the shapes of operand and result on this rank.
        own: this rank's index in the group of so many ``ranks``.
        group: the name of the process group.
    """
    view = tuple(n for dim in given["parts"] for n in dim) if given.get("parts") else tuple(piece)
    dim, sizes = given.get("dim"), tuple(given.get("sizes") or ())
    shape = tuple(result)
    if function in (transfers.all_reduce, transfers.reduce_scatter):
        kind = given.get("op", "sum")
        if is_gathered(kind, dtype):
            scattered = None if dim is None else (view, dim, sizes, own, shape)
            return Exchange(start_product, (ranks, group), finish_scattered_product if scattered else finish_product, scattered or ())
        by = Reduction.of(kind, dtype, ranks)
        if dim is None:
            return Exchange(start_all_reduce, (by.op, group), wait, (), by.before, by.after)
        return Exchange(start_reduce_scatter, (view, dim, sizes, by.op, group), finish_reduce_scatter, (shape, dim, sizes[own], own), by.before, by.after)
    if function is transfers.all_gather:
        assert dim is not None
        if max(sizes) * len(sizes) > PADDING * sum(sizes):
            pieces = tuple(tuple(size if d == dim else n for d, n in enumerate(view)) for size in sizes)
            received = tuple(math.prod(piece) * dtype.itemsize for piece in pieces)
            return Exchange(start_uneven_all_gather, (len(sizes), received, group), finish_uneven_all_gather,
                            (shape, dim, received, pieces, dtype))  # fmt: skip
        return Exchange(start_all_gather, (view, dim, sizes, group), finish_all_gather, (shape, dim, sizes, dtype))
    assert function is transfers.all_to_all, function
    source, target, new_sizes = given["source"], given["target"], tuple(given["new_sizes"])
    mine = {target: new_sizes[own]}
    pieces = tuple(tuple({**mine, source: size}.get(d, n) for d, n in enumerate(view)) for size in sizes)
    received = tuple(math.prod(piece) for piece in pieces)
    return Exchange(start_all_to_all, (view, target, new_sizes, received, group), finish_all_to_all,
                    (shape, source, pieces, dtype))  # fmt: skip


def redistribution(plan: Packing, ranks: Sequence[int], dtype: torch.dtype, group: str) -> Exchange:
    """A redistribute among ``ranks``, in the order of the process group. ``finish`` takes the old piece too."""
    sends, gets = dict(plan.sends), dict(plan.receives)
    received = tuple(size_of(gets[rank]) * dtype.itemsize if rank in gets else 0 for rank in ranks)
    by_rank = sorted(plan.receives, key=lambda one: ranks.index(one[0]))
    plan = plan._replace(receives=tuple(by_rank))
    return Exchange(start_redistribute, (tuple(sends.get(rank) for rank in ranks), received, group), finish_redistribute,
                    (plan, received))  # fmt: skip
