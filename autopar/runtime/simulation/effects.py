"""What each transfer does to the pieces of the ranks: the meaning that simulation runs, and processes must match."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir import transfers
from autopar.ir.mesh import Mesh
from autopar.ir.ops.seeded_random import folded
from autopar.ir.transfers import Meshes
from autopar.runtime.lowering.packing import new_piece, packing, take

Given = Mapping[str, Any]

_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}


def _in_parts(x: torch.Tensor, given: Given) -> torch.Tensor:
    parts = given.get("parts")
    return x if parts is None else x.reshape([n for dim in parts for n in dim])


def _result(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return x.reshape(list(shape)).contiguous()


def _local_shape(function: Any, x: torch.Tensor, given: Given, at: Mapping[str, int]) -> tuple[int, ...]:
    return transfers.local_shape(function, x.shape, given, at)


@dataclass(frozen=True)
class Here:
    """A rank, its meshes, and its coordinates on the one that is meant."""

    meshes: Meshes
    rank: int
    at: Mapping[str, int]


def _slice(x: torch.Tensor, given: Given, here: Here) -> torch.Tensor:
    sizes, index = given["sizes"], here.at[given["axis"]]
    piece = _in_parts(x, given).narrow(given["dim"], sum(sizes[:index]), sizes[index])
    return _result(piece, _local_shape(transfers.slice, x, given, here.at))


def neutral(op: str, dtype: torch.dtype) -> Any:
    """What changes nothing in a reduction."""
    if op in ("sum", "prod"):
        return op == "prod"
    if dtype == torch.float8_e4m3fn:  # which has no infinity
        return torch.finfo(dtype).min if op == "max" else torch.finfo(dtype).max
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    if dtype == torch.bool:
        return op == "min"
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def pending_piece(x: torch.Tensor, given: Given, at: Mapping[str, int]) -> torch.Tensor:
    """What a rank holds of a value that becomes pending: the value, its piece among neutral elements, or these alone."""
    op, index = given.get("op", "sum"), at[given["axis"]]
    if given.get("dim") is None:
        return x if index == 0 or op not in ("sum", "prod") else torch.full_like(x, neutral(op, x.dtype))
    piece, sizes = _in_parts(x, given), given["sizes"]
    shape = list(piece.shape)
    shape[given["dim"]] = sum(sizes)
    whole = piece.new_full(shape, neutral(op, x.dtype))
    whole.narrow(given["dim"], sum(sizes[:index]), sizes[index]).copy_(piece)
    return _result(whole, _local_shape(transfers.pend, x, given, at))


def _pend(x: torch.Tensor, given: Given, here: Here) -> torch.Tensor:
    return pending_piece(x, given, here.at)


def _all_gather(xs: list[torch.Tensor], givens: list[Given], there: list[Here]) -> list[torch.Tensor]:
    whole = torch.cat([_in_parts(x, g) for x, g in zip(xs, givens, strict=True)], dim=givens[0]["dim"])
    return [_result(whole, _local_shape(transfers.all_gather, xs[0], givens[0], {}))] * len(xs)


def _reduced(xs: list[torch.Tensor], givens: list[Given]) -> torch.Tensor:
    op, dtype = givens[0].get("op", "sum"), xs[0].dtype
    xs = [x.to(transfers.reduced_as(op, dtype)) for x in xs]
    if op == "avg":
        return (functools.reduce(torch.add, xs) / len(xs)).to(dtype)
    return functools.reduce(_REDUCE[op], xs).to(dtype)


def _all_reduce(xs: list[torch.Tensor], givens: list[Given], there: list[Here]) -> list[torch.Tensor]:
    return [_reduced(xs, givens)] * len(xs)


def _reduce_scatter(xs: list[torch.Tensor], givens: list[Given], there: list[Here]) -> list[torch.Tensor]:
    given = givens[0]
    pieces = _in_parts(_reduced(xs, givens), given).split(list(given["sizes"]), dim=given["dim"])
    shapes = [_local_shape(transfers.reduce_scatter, xs[0], given, {given["axis"]: k}) for k in range(len(xs))]
    return [_result(piece, shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _all_to_all(xs: list[torch.Tensor], givens: list[Given], there: list[Here]) -> list[torch.Tensor]:
    given = givens[0]
    rows = [_in_parts(x, g).split(list(given["new_sizes"]), dim=given["target"]) for x, g in zip(xs, givens, strict=True)]
    columns = [torch.cat(column, dim=given["source"]) for column in zip(*rows, strict=True)]
    shapes = [_local_shape(transfers.all_to_all, xs[0], given, {given["axis"]: k}) for k in range(len(xs))]
    return [_result(column, shape) for column, shape in zip(columns, shapes, strict=True)]


def _redistribute(xs: list[torch.Tensor], givens: list[Given], there: list[Here]) -> list[torch.Tensor]:
    plans = [packing(transfers.Ends.of(g, here.meshes), here.rank, g.get("kept", ())) for g, here in zip(givens, there, strict=True)]
    sent = {
        (here.rank, receiver): take(x, places)
        for here, x, plan in zip(there, xs, plans, strict=True)
        for receiver, places in plan.sends
    }
    return [
        new_piece(plan, x.dtype, x.device, x, [sent[sender, here.rank] for sender, _ in plan.receives])
        for here, x, plan in zip(there, xs, plans, strict=True)
    ]


def place_along(given: Given, at: Mapping[str, int], mesh: Mesh) -> int:
    """The number of a rank's piece along the axes of a transfer; ranks that differ only along others have one."""
    place = 0
    for axis in transfers.axes_of(given["axis"]):
        place = place * mesh.sizes[axis] + at[axis]
    return place


LOCAL: dict[Any, Callable[..., torch.Tensor]] = {
    transfers.slice: _slice,
    transfers.pend: _pend,
    transfers.cast: lambda x, given, here: x.to(given["dtype"]),
    transfers.fold_in: lambda x, given, here: folded(x, place_along(given, here.at, here.meshes[given.get("stage")])),
    transfers.wait: lambda x, given, here: x,
    transfers.redistribute: lambda x, given, here: _redistribute([x], [given], [here])[0],  # where nothing travels
}

COLLECTIVE: dict[Any, Callable[..., list[torch.Tensor]]] = {
    transfers.all_gather: _all_gather,
    transfers.all_reduce: _all_reduce,
    transfers.reduce_scatter: _reduce_scatter,
    transfers.all_to_all: _all_to_all,
    transfers.redistribute: _redistribute,
}
