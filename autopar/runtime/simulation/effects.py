"""Define what each collective does to the pieces of the ranks.

Simulation runs these functions, and processes must match them.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir import transfers
from autopar.ir.mesh import Mesh
from autopar.ir.subaxes import index_along
from autopar.ir.transfers import Meshes
from autopar.runtime.lowering.packing import new_piece, packing, take

Arguments = Mapping[str, Any]  # of a transfer, by name

_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}


def _in_parts(x: torch.Tensor, arguments: Arguments) -> torch.Tensor:
    parts = arguments.get("parts")
    return x if parts is None else x.reshape([n for dim in parts for n in dim])


def _result(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return x.reshape(list(shape)).contiguous()


def _local_shape(function: Any, x: torch.Tensor, arguments: Arguments, at: Mapping[str, int]) -> tuple[int, ...]:
    return transfers.local_shape(function, x.shape, arguments, at)


@dataclass(frozen=True)
class RankPosition:
    """A rank, the meshes, and its coordinates ``at`` on the mesh of a transfer."""

    meshes: Meshes
    rank: int
    at: Mapping[str, int]


def neutral(op: str, dtype: torch.dtype) -> Any:
    """Return the neutral element of a reduction."""
    if op in ("sum", "prod"):
        return op == "prod"
    if dtype == torch.float8_e4m3fn:  # this dtype has no infinity
        return torch.finfo(dtype).min if op == "max" else torch.finfo(dtype).max
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    if dtype == torch.bool:
        return op == "min"
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def pending_piece(x: torch.Tensor, arguments: Arguments, at: Mapping[str, int]) -> torch.Tensor:
    """Return a rank's piece of a value that becomes pending.

    It is the value, its part among neutral elements, or neutral elements alone.
    """
    op, index = arguments.get("op", "sum"), index_along(arguments["axis"], at)
    if arguments.get("dim") is None:
        return x if index == 0 or op not in ("sum", "prod") else torch.full_like(x, neutral(op, x.dtype))
    piece, sizes = _in_parts(x, arguments), arguments["sizes"]
    shape = list(piece.shape)
    shape[arguments["dim"]] = sum(sizes)
    whole = piece.new_full(shape, neutral(op, x.dtype))
    whole.narrow(arguments["dim"], sum(sizes[:index]), sizes[index]).copy_(piece)
    return _result(whole, _local_shape(transfers.pend, x, arguments, at))


def _all_gather(
    xs: list[torch.Tensor], arguments_by_rank: list[Arguments], positions: list[RankPosition]
) -> list[torch.Tensor]:
    whole = torch.cat(
        [_in_parts(x, arguments) for x, arguments in zip(xs, arguments_by_rank, strict=True)],
        dim=arguments_by_rank[0]["dim"],
    )
    return [_result(whole, _local_shape(transfers.all_gather, xs[0], arguments_by_rank[0], {}))] * len(xs)


_SEED: ContextVar[int | None] = ContextVar("seed of the orders of adding", default=None)


@contextmanager
def adding_orders(seed: int) -> Iterator[None]:
    """Let each kind of collective add in an order of its own: that of the ranks is one of many.

    What is simulated inside adds in orders that follow from the seed, the arguments of the collective and the shape. So
    replicas stay equal, and a value that is reduced in two ways differs in the last bit, as it may on processes.
    """
    token = _SEED.set(seed)
    try:
        yield
    finally:
        _SEED.reset(token)


def _reduced(xs: list[torch.Tensor], arguments_by_rank: list[Arguments]) -> torch.Tensor:
    op, dtype = arguments_by_rank[0].get("op", "sum"), xs[0].dtype
    xs = [x.to(transfers.reduced_as(op, dtype)) for x in xs]
    if (seed := _SEED.get()) is not None:
        about = sorted((name, str(value)) for name, value in arguments_by_rank[0].items())
        random.Random(f"{seed} {about} {tuple(xs[0].shape)}").shuffle(xs)
    if op == "avg":
        return (functools.reduce(torch.add, xs) / len(xs)).to(dtype)
    return functools.reduce(_REDUCE[op], xs).to(dtype)


def _all_reduce(
    xs: list[torch.Tensor], arguments_by_rank: list[Arguments], positions: list[RankPosition]
) -> list[torch.Tensor]:
    return [_reduced(xs, arguments_by_rank)] * len(xs)


def _reduce_scatter(
    xs: list[torch.Tensor], arguments_by_rank: list[Arguments], positions: list[RankPosition]
) -> list[torch.Tensor]:
    arguments = arguments_by_rank[0]
    pieces = _in_parts(_reduced(xs, arguments_by_rank), arguments).split(list(arguments["sizes"]), dim=arguments["dim"])
    shapes = [_local_shape(transfers.reduce_scatter, xs[0], arguments, {arguments["axis"]: k}) for k in range(len(xs))]
    return [_result(piece, shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _all_to_all(
    xs: list[torch.Tensor], arguments_by_rank: list[Arguments], positions: list[RankPosition]
) -> list[torch.Tensor]:
    arguments = arguments_by_rank[0]
    rows = [
        _in_parts(x, arguments).split(list(arguments["new_sizes"]), dim=arguments["target"])
        for x, arguments in zip(xs, arguments_by_rank, strict=True)
    ]
    columns = [torch.cat(column, dim=arguments["source"]) for column in zip(*rows, strict=True)]
    shapes = [_local_shape(transfers.all_to_all, xs[0], arguments, {arguments["axis"]: k}) for k in range(len(xs))]
    return [_result(column, shape) for column, shape in zip(columns, shapes, strict=True)]


def _redistribute(
    xs: list[torch.Tensor], arguments_by_rank: list[Arguments], positions: list[RankPosition]
) -> list[torch.Tensor]:
    plans = [
        packing(transfers.Ends.of(arguments, position.meshes), position.rank, arguments.get("kept", ()))
        for arguments, position in zip(arguments_by_rank, positions, strict=True)
    ]
    sent = {
        (position.rank, receiver): take(x, places)
        for position, x, plan in zip(positions, xs, plans, strict=True)
        for receiver, places in plan.sends
    }
    return [
        new_piece(plan, x.dtype, x.device, x, [sent[sender, position.rank] for sender, _ in plan.receives])
        for position, x, plan in zip(positions, xs, plans, strict=True)
    ]


def place_along(arguments: Arguments, at: Mapping[str, int], mesh: Mesh) -> int:
    """Return the index of a rank's piece along the axes of a transfer.

    Ranks that differ only along other axes have the same index.
    """
    place = 0
    for axis in transfers.axes_of(arguments["axis"]):
        place = place * mesh.sizes[axis] + index_along(axis, at)
    return place


def chunk(function: Any, xs: list[torch.Tensor], arguments_by_rank: list[Arguments], span: tuple[int, int],
          positions: list[RankPosition]) -> list[torch.Tensor]:  # fmt: skip
    """Run the part of a collective that sends some elements of each operand, or of each row of a reduce-scatter."""
    begin, end = span
    if function is transfers.all_gather:
        rows = torch.stack([x.reshape(-1)[begin:end] for x in xs])
        return [rows.clone() for _ in xs]
    if function is transfers.all_reduce:
        flat = [x.reshape(-1)[begin:end] for x in xs]
        return _all_reduce(flat, arguments_by_rank, positions)
    whole = _reduce_scatter(xs, arguments_by_rank, positions)
    return [piece.reshape(-1)[begin:end].clone() for piece in whole]


COLLECTIVE: dict[Any, Callable[..., list[torch.Tensor]]] = {
    transfers.all_gather: _all_gather,
    transfers.all_reduce: _all_reduce,
    transfers.reduce_scatter: _reduce_scatter,
    transfers.all_to_all: _all_to_all,
    transfers.redistribute: _redistribute,
}
