"""Write a collective over several hosts level by level, where that takes a machine fewer nanoseconds.

g_dp : f32[64 32] = all_reduce(g, dp)      →      g_dp_within4 : f32[64/dp.within4 32] +dp.across4 = reduce_scatter(g, 0, dp.within4)
                                                  g_dp_across4 : f32[64/dp.within4 32] = all_reduce(g_dp_within4, dp.across4)
                                                  g_dp_1 : f32[64 32] = all_gather(g_dp_across4, 0, dp.within4)
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from autopar.costs.machine import Machine
from autopar.costs.prices import step_price
from autopar.costs.ways import BY_LEVELS, Part, Way, ways
from autopar.ir import transfers
from autopar.ir.layout import Axes
from autopar.ir.record import TensorType
from autopar.ir.sizes import Size, divides
from autopar.transitions.chain import Move, TransferChain, TransferStep, parts_argument

Parts = tuple[tuple[int, ...], ...]


def cheapest_way(step: TransferStep, source: TensorType, machine: Machine) -> tuple[int, tuple[TransferStep, ...]]:
    """Return the nanoseconds of a transfer, and what it consists of: itself, or a collective for each level."""
    name = getattr(step.function, "__name__", "")
    if name not in BY_LEVELS or source.layout is None:
        return at_once(step, source, machine), (step,)
    axes = transfers.axes_of(dict(step.arguments)["axis"])
    if not ways(name, axes, source.layout.mesh, machine.borders):
        return at_once(step, source, machine), (step,)
    return _cheapest(step, source, machine)


def at_once(step: TransferStep, source: TensorType, machine: Machine) -> int:
    """Return the nanoseconds of a transfer as it is."""
    return round(step_price(step.function, source, dict(step.arguments), step.type, machine) * 1e9)


@lru_cache(maxsize=65536)
def _cheapest(step: TransferStep, source: TensorType, machine: Machine) -> tuple[int, tuple[TransferStep, ...]]:
    best: tuple[int, tuple[TransferStep, ...]] = at_once(step, source, machine), (step,)
    for chain in _chains(step, source, machine):
        paid, here = 0, source
        for other in chain.steps:
            paid += at_once(other, here, machine)
            here = other.type
        if paid < best[0]:
            best = paid, chain.steps
    return best


def _chains(step: TransferStep, source: TensorType, machine: Machine) -> Iterator[TransferChain]:
    """Yield each way of a collective, on each part of the value that it may split on the way."""
    assert source.layout is not None
    arguments, mesh = dict(step.arguments), source.layout.mesh
    name, axes = step.function.__name__, transfers.axes_of(arguments["axis"])
    kind = arguments.get("op", "sum")
    if name != "all_gather" and (
        transfers.reduced_as(kind, source.dtype) != source.dtype or transfers.is_gathered(kind, source.dtype)
    ):
        return  # the parts would be rounded, or each rank reduces them
    for way in ways(name, axes, mesh, machine.borders):
        found = _on_parts(way, source, arguments) if name == "all_reduce" else _on_digits(way, source, step, arguments)
        for moves in found:
            try:
                chain = TransferChain(source).then(*moves)
            except transfers.LayoutMismatch:  # uneven pieces along another axis, which have no such parts
                continue
            if chain.type == step.type:
                yield chain


def _on_parts(way: Way, source: TensorType, arguments: Mapping[str, Any]) -> Iterator[list[Move]]:
    """Yield an all-reduce that scatters each part in turn; only those with even pieces, if there are such parts."""
    assert source.layout is not None
    mesh, parts = source.layout.mesh, transfers.part_sizes(source.attr, source.shape)
    pieces = math.prod([mesh.count(part.axes) for part in way if part.name == "reduce_scatter"])
    sizes = [
        (place, size // mesh.count(axes) if divides(mesh.count(axes), size) else 0)
        for place, (size, axes) in enumerate(source.attr.parts(source.shape))
        if size and not isinstance(size, Size)
    ]
    even = [place for place, size in sizes if size and size % pieces == 0]
    for place in even or [place for place, _ in sizes]:
        yield [_move(part, place, parts, arguments) for part in way]


def _on_digits(way: Way, source: TensorType, step: TransferStep, arguments: Mapping[str, Any]) -> Iterator[list[Move]]:
    """Yield a gather or a reduce-scatter of a part that is seen as one part for each sub-axis: ``64/dp`` as ``2 4 8``.

    Pieces have to be even.
    """
    split = source if step.function is transfers.all_gather else step.type
    assert split.layout is not None
    mesh, given = split.layout.mesh, arguments.get("parts")
    rows: list[list[int]] = [list(dim) for dim in given] if given else [[n] for n in split.shape]
    places = [(d, k) for d, dim in enumerate(rows) for k in range(len(dim))]
    d, k = places[arguments["dim"]]
    axes: Axes = transfers.split_parts(split.attr, split.shape, mesh, given)[d][k]
    size, count = rows[d][k], mesh.count(axes)
    if isinstance(size, Size) or not size or size % count:
        return
    outer = mesh.count(axes[:-1])
    digits = sorted(way, key=lambda part: -part.less)  # the outermost sub-axis has the fewest bytes
    counts = [mesh.count(part.axes) for part in digits]
    seen = [*[outer][: outer > 1], *counts, *[size // count][: size // count > 1]]
    rows[d][k : k + 1] = seen
    first = arguments["dim"] + (outer > 1)
    parts = tuple(map(tuple, rows))
    at = {part: first + k for k, part in enumerate(digits)}
    yield [_move(part, at[part], parts, arguments) for part in way]


def _move(part: Part, place: int, parts: Parts, arguments: Mapping[str, Any]) -> Move:
    function = transfers.TRANSFERS[part.name].function
    op = {"op": arguments["op"]} if "op" in arguments and part.name != "all_gather" else {}
    axis = part.axes[0] if len(part.axes) == 1 else part.axes
    if part.name == "all_reduce":
        return function, {"axis": axis, **op}
    return function, {"dim": place, "axis": axis, **op, **parts_argument(parts)}
