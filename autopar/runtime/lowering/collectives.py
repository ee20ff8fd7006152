"""Run transfers on real processes by functional collectives, which the first reader of a result waits for.

Each transfer that exchanges data is a pair of functions on one rank's piece. ``start_…`` brings the piece into the form
that the collective takes and starts it; ``finish_…`` waits and brings the received data into the form of the result. In
between the program goes on. The collectives are torch's own, native on gloo and NCCL: nothing is gathered in order to
be reduced or exchanged. Pieces of unequal sizes are padded to the largest, except in an all-to-all, which takes unequal
sizes.

``view`` is the shape to which ``dim`` refers: the shape of the piece with merged dims split into their parts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import Target

from autopar.ir import transfers
from autopar.runtime.lowering.packing import Packing, Places, as_bytes, from_bytes, new_piece, size_of, take
from autopar.runtime.lowering.reduction import Calls, Reduction
from autopar.runtime.marks import wait_begins, wait_ends
from autopar.runtime.processes.one_rank import alone
from autopar.runtime.wire.wire_groups import WIRE_GROUPS
from autopar.torch_private import FUNCTIONAL, below_autograd, start_gather

Shape = Sequence[int]

CARRIERS = {  # dtypes that no backend moves → dtypes of the same width, for data that is only copied
    torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8, torch.int16: torch.float16,
    torch.uint16: torch.float16, torch.uint32: torch.int32, torch.uint64: torch.int64,
}  # fmt: skip
PADDING = 1.05  # the most bytes that an exchange of padded pieces may send, relative to the pieces


@dataclass(frozen=True)
class Exchange:
    """A transfer on one rank, or a bucket of them: a function that starts it and one that finishes it.

    Attributes:
        start, finish: the two functions.
        start_args, finish_args: their arguments after the tensor.
        before: functions to call on the tensor before it is sent: a reduction may need another dtype.
        after: functions to call on the received tensor: the dtype of the result, or the division of an average.
    """

    start: Callable[..., torch.Tensor]
    start_args: tuple[Any, ...]
    finish: Callable[..., Any]
    finish_args: tuple[Any, ...] = ()
    before: Calls = ()
    after: Calls = ()


def wait(started: torch.Tensor) -> torch.Tensor:
    """Wait for a collective, and return its result."""
    begun = wait_begins()
    with below_autograd():
        result = FUNCTIONAL.wait_tensor(started)
    wait_ends(begun)
    return result


def start_all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return FUNCTIONAL.all_reduce(x.contiguous(), op, group)


def start_all_reduce_in_place(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """All-reduce an operand that nothing reads again, without a second buffer."""
    return FUNCTIONAL.all_reduce_(x.contiguous(), op, group)


def start_all_gather(x: torch.Tensor, view: Shape, dim: int, sizes: Shape, group: str) -> torch.Tensor:
    piece = _padded(x.reshape(view), dim, max(sizes)).contiguous()
    return start_gather(carried(piece).unsqueeze(0), len(sizes), group)


def finish_all_gather(started: torch.Tensor, shape: Shape, dim: int, sizes: Shape, dtype: torch.dtype) -> torch.Tensor:
    pieces = wait(started).view(dtype)  # [ranks, *piece]
    if dim == 0 and len(set(sizes)) == 1:
        return pieces.reshape(shape)
    return torch.cat([p.narrow(dim, 0, n) for p, n in zip(pieces.unbind(), sizes, strict=True)], dim).reshape(shape)


def start_exchange(flat: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> torch.Tensor:
    """Send ``sent`` rows to each rank of the group, and receive ``received`` ones.

    Without other ranks the rows that are received are zeros: torch's fake group leaves them as they are in memory,
    where an index may be out of bounds, and refuses to receive where nothing is sent.
    """
    if alone() is not None:
        return flat.new_zeros((sum(received), *flat.shape[1:]))
    return FUNCTIONAL.all_to_all_single(flat, list(received), list(sent), group)


def start_uneven_all_gather(x: torch.Tensor, ranks: int, received: Shape, group: str) -> torch.Tensor:
    """Gather pieces that padding would make much larger: each rank sends its piece to each other rank."""
    flat = as_bytes(x)
    return start_exchange(flat.repeat(ranks), list(received), [flat.numel()] * ranks, group)


def finish_uneven_all_gather(
    started: torch.Tensor, shape: Shape, dim: int, received: Shape, pieces: Sequence[Shape], dtype: torch.dtype
) -> torch.Tensor:
    flat = wait(started).split(list(received))
    return torch.cat([from_bytes(c, dtype).reshape(piece) for c, piece in zip(flat, pieces, strict=True)], dim).reshape(
        shape
    )


def start_redistribute(x: torch.Tensor, sends: Sequence[Places | None], received: Shape, group: str) -> torch.Tensor:
    """Send to each rank of the group the box that it needs; most ranks need none."""
    boxes = [x.new_empty(0) if places is None else take(x, places).reshape(-1) for places in sends]
    flat = as_bytes(torch.cat(boxes))
    width = x.element_size()
    return start_exchange(flat, list(received), [box.numel() * width for box in boxes], group)


def finish_redistribute(started: torch.Tensor, x: torch.Tensor, plan: Packing, received: Shape) -> torch.Tensor:
    boxes = [from_bytes(box, x.dtype) for box in wait(started).split([n for n in received if n])]
    return new_piece(plan, x.dtype, x.device, x, boxes)


def redistribute_locally(x: torch.Tensor, plan: Packing) -> torch.Tensor:
    """Run a redistribute that needs no data from other ranks."""
    return new_piece(plan, x.dtype, x.device, x, [])


def start_reduce_scatter(x: torch.Tensor, view: Shape, dim: int, sizes: Shape, op: str, group: str) -> torch.Tensor:
    pieces = x.reshape(view).split(list(sizes), dim)
    return start_scatter(torch.stack([_padded(piece, dim, max(sizes)) for piece in pieces]), op, group)


def finish_reduce_scatter(started: torch.Tensor, shape: Shape, dim: int, size: int, rank: int) -> torch.Tensor:
    return own_row(started, rank).narrow(dim, 0, size).reshape(shape).contiguous()


def start_scatter(rows: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """Reduce ``rows``, ``[ranks, …]``, so that each rank gets the sum of one row. ``rows`` may be overwritten.

    On CPU this is an all-reduce: gloo's reduce-scatter is an all-reduce of a copy, and takes more than twice as long (8
    MB on two ranks: 2.8 and 6.4 ms with torch 2.13). An emulated wire charges it as a reduce-scatter.
    """
    if group in WIRE_GROUPS:
        return WIRE_GROUPS[group].start_scatter(rows, op)
    if rows.is_cpu:
        return FUNCTIONAL.all_reduce_(rows, op, group)
    return FUNCTIONAL.reduce_scatter_tensor(rows, op, len(rows), group)


def own_row(started: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the row that ``start_scatter`` reduces for one rank of the group, in its own memory."""
    rows = wait(started)
    return rows[rank].clone() if len(rows) > 1 else rows[0]


def start_product(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """Gather the factors of all ranks."""
    return start_gather(x.resolve_conj().contiguous().unsqueeze(0), ranks, group)


def finish_product(started: torch.Tensor) -> torch.Tensor:
    """Multiply the factors in the order of the ranks, so that all ranks get the same bits."""
    return functools.reduce(torch.mul, wait(started).unbind())


def finish_scattered_product(
    started: torch.Tensor, view: Shape, dim: int, sizes: Shape, index: int, shape: Shape
) -> torch.Tensor:
    return (
        finish_product(started).reshape(view).narrow(dim, sum(sizes[:index]), sizes[index]).reshape(shape).contiguous()
    )


def start_all_to_all(
    x: torch.Tensor, view: Shape, target: int, new_sizes: Shape, received: Shape, group: str
) -> torch.Tensor:
    pieces = [piece.reshape(-1) for piece in x.reshape(view).split(list(new_sizes), target)]
    sent = [piece.numel() for piece in pieces]
    flat = torch.cat(pieces)
    if not x.is_complex():  # no backend exchanges complex numbers
        return start_exchange(carried(flat), list(received), sent, group)
    return start_exchange(torch.view_as_real(flat), list(received), sent, group)


def finish_all_to_all(
    started: torch.Tensor, shape: Shape, source: int, pieces: Sequence[Shape], dtype: torch.dtype
) -> torch.Tensor:
    flat = wait(started)
    flat = torch.view_as_complex(flat) if dtype.is_complex else flat.view(dtype)
    columns = flat.split([math.prod(piece) for piece in pieces])
    return torch.cat([c.reshape(piece) for c, piece in zip(columns, pieces, strict=True)], source).reshape(shape)


def carried(x: torch.Tensor) -> torch.Tensor:
    """Return the same bits, in the same shape, in a dtype that backends move."""
    return x.resolve_conj().view(CARRIERS.get(x.dtype, x.dtype))


def _padded(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Pad ``x`` with zeros at the end of ``dim``, to ``size``."""
    if x.shape[dim] == size:
        return x
    return torch.cat([x, x.new_zeros([size - n if d == dim else n for d, n in enumerate(x.shape)])], dim)


# -- from a transfer of a local program -------------------------------------------------------------------------------


def exchange(function: Target, arguments: Mapping[str, Any], piece: Shape, result: Shape, dtype: torch.dtype,
             index: int, ranks: int, group: str) -> Exchange:  # fmt: skip
    """Return the collective of a transfer.

    Args:
        function: the transfer.
        arguments: its arguments by name, with explicit sizes, as in a local program.
        piece, result: the shapes of operand and result on this rank.
        index: this rank's index in the group.
        ranks: the number of ranks of the group.
        group: the name of the process group.
    """
    view = flat_view(arguments, piece)
    dim, sizes = arguments.get("dim"), tuple(arguments.get("sizes") or ())
    shape = tuple(result)
    if function in (transfers.all_reduce, transfers.reduce_scatter):
        kind = arguments.get("op", "sum")
        if transfers.is_gathered(kind, dtype):
            scattered = None if dim is None else (view, dim, sizes, index, shape)
            return Exchange(
                start_product,
                (ranks, group),
                finish_scattered_product if scattered else finish_product,
                scattered or (),
            )
        reduction = Reduction.of(kind, dtype, ranks)
        if dim is None:
            return Exchange(start_all_reduce, (reduction.op, group), wait, (), reduction.before, reduction.after)
        return Exchange(
            start_reduce_scatter,
            (view, dim, sizes, reduction.op, group),
            finish_reduce_scatter,
            (shape, dim, sizes[index], index),
            reduction.before,
            reduction.after,
        )
    if function is transfers.all_gather:
        assert dim is not None
        if max(sizes) * len(sizes) > PADDING * sum(sizes):
            pieces = tuple(tuple(size if d == dim else n for d, n in enumerate(view)) for size in sizes)
            received = tuple(math.prod(piece) * dtype.itemsize for piece in pieces)
            return Exchange(start_uneven_all_gather, (len(sizes), received, group), finish_uneven_all_gather,
                            (shape, dim, received, pieces, dtype))  # fmt: skip
        return Exchange(start_all_gather, (view, dim, sizes, group), finish_all_gather, (shape, dim, sizes, dtype))
    assert function is transfers.all_to_all, function
    source, target, new_sizes = arguments["source"], arguments["target"], tuple(arguments["new_sizes"])
    own_size = {target: new_sizes[index]}
    pieces = tuple(tuple({**own_size, source: size}.get(d, n) for d, n in enumerate(view)) for size in sizes)
    received = tuple(math.prod(piece) for piece in pieces)
    return Exchange(start_all_to_all, (view, target, new_sizes, received, group), finish_all_to_all,
                    (shape, source, pieces, dtype))  # fmt: skip


def flat_view(arguments: Mapping[str, Any], shape: Shape) -> tuple[int, ...]:
    """Return the shape of a piece with merged dims split into their parts, to which the dims of a transfer refer."""
    return tuple(n for dim in arguments["parts"] for n in dim) if arguments.get("parts") else tuple(shape)


def redistribution(plan: Packing, ranks: Sequence[int], dtype: torch.dtype, group: str) -> Exchange:
    """Return a redistribute among ``ranks``, in the order of the process group. ``finish`` also takes the old piece."""
    sends, receives = dict(plan.sends), dict(plan.receives)
    received = tuple(size_of(receives[rank]) * dtype.itemsize if rank in receives else 0 for rank in ranks)
    by_rank = sorted(plan.receives, key=lambda row: ranks.index(row[0]))
    plan = plan._replace(receives=tuple(by_rank))
    return Exchange(start_redistribute, (tuple(sends.get(rank) for rank in ranks), received, group),
                    finish_redistribute, (plan, received))  # fmt: skip
