"""Relayouts: from splits to splits, or from mesh to mesh, with what is pending kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from autopar.ir import transfers
from autopar.ir.boxes import most_lacked
from autopar.ir.layout import Axes, Dim, align, in_common, sized
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.transitions.way import Move, Way, parts_argument


def relaid(way: Way, goal: TensorType) -> Way:
    """On to the splits of ``goal``, and to its dtype, with the cast where fewer bytes move; what is pending stays so."""
    here = way.type
    assert here.layout is not None and goal.layout is not None
    narrow = here.dtype.itemsize >= goal.dtype.itemsize
    cast: list[Move] = [(transfers.cast, {"dtype": goal.dtype})] if here.dtype != goal.dtype else []
    if here.layout.mesh != goal.layout.mesh:
        splits, parts = transfers.flat_splits(goal.attr, goal.shape)
        stage = goal.layout.mesh.name
        between: list[Move] = [
            (transfers.send, {"stage": stage}),
            (transfers.recv, {"stage": stage, "splits": splits, **({} if parts is None else {"parts": parts})}),
        ]
        return way.then(*([*cast, *between] if narrow else [*between, *cast]), meshes={stage: goal.layout.mesh})
    moves = _exchange(replace(here, dtype=torch.uint8), replace(goal, dtype=torch.uint8))
    first = next((k for k, (function, _) in enumerate(moves) if transfers.BY_FUNCTION[function].collective), len(moves))
    at = first if narrow else len(moves)
    return way.then(*moves[:at], *cast, *moves[at:])


@lru_cache(maxsize=65536)
def _exchange(here: TensorType, goal: TensorType) -> tuple[Move, ...]:
    """Slices with one exchange, or with gathers, if nothing brings a rank less; else one redistribute.

    Several gathers send what several ranks need over a slow link only once; several exchanges of another kind are one.
    """
    if here.layout == goal.layout:
        return ()
    assert here.layout is not None and goal.layout is not None
    least = most_lacked(here.layout, goal.layout, here.shape)
    chains = []
    for parts, own, wanted in views(here.attr.dims, goal.attr.dims, here.shape, here.layout.mesh):
        moves = _chain(own, wanted, parts_argument(parts))
        exchanges = [function for function, _ in moves or () if transfers.BY_FUNCTION[function].collective]
        if moves is not None and (len(exchanges) < 2 or set(exchanges) == {transfers.all_gather}):
            way = Way(here).then(*moves)
            if way.type == goal and way.bytes <= least:
                chains.append(tuple((step.function, dict(step.arguments)) for step in way.steps))
    if chains:
        return min(chains, key=len)
    splits, parts = transfers.flat_splits(goal.attr, goal.shape)
    return ((transfers.redistribute, {"splits": splits, **({} if parts is None else {"parts": parts})}),)


def _chain(own: list[Axes], wanted: list[Axes], parts: dict[str, Any]) -> list[Move] | None:
    """Slices, then all-to-alls, then gathers, as far as they go; ``None`` where a gathered axis would be split again."""
    moves: list[Move] = []
    homes = {axis: place for place, axes in enumerate(wanted) for axis in axes}
    while own != wanted:
        used = {axis for axes in own for axis in axes}
        move: Move | None = None
        for place, (have, want) in enumerate(zip(own, wanted, strict=True)):
            if len(have) < len(want) and have == want[: len(have)] and want[len(have)] not in used:
                move, own[place] = (transfers.slice, {"dim": place, "axis": want[len(have)], **parts}), want[: len(have) + 1]
                break
        if move is None:
            loose = [k for k, (have, want) in enumerate(zip(own, wanted, strict=True)) if have != want[: len(have)]]
            for place in loose:
                axis = own[place][-1]
                home = homes.get(axis, place)
                if home != place and (*own[home], axis) == wanted[home][: len(own[home]) + 1]:
                    move = (transfers.all_to_all, {"source": place, "target": home, "axis": axis, **parts})
                    own[place], own[home] = own[place][:-1], (*own[home], axis)
                    break
            if move is None:
                free = [place for place in loose if own[place][-1] not in homes]
                if not free:
                    return None
                move = (transfers.all_gather, {"dim": free[0], "axis": own[free[0]][-1], **parts})
                own[free[0]] = own[free[0]][:-1]
        moves.append(move)
    return moves


View = tuple[tuple[tuple[int, ...], ...], list[Axes], list[Axes]]  # part sizes; the axes of every part, here and there


def views(here: Sequence[Dim], goal: Sequence[Dim], shape: Sequence[int], mesh: Mesh) -> Iterator[View]:
    """Parts in which both can be seen, dim by dim: the goal's, its own, or the finest common ones; and the finest.

    In the finest parts every axis is the minor-most split of a part: ``8/dp/tp`` is ``2/dp 2/tp 2``.
    """
    dims = [_views_of(dim, want, size, mesh) for size, dim, want in zip(shape, here, goal, strict=True)]
    if not all(dims):
        return
    picks = [[views[0] for views in dims], [views[-1] for views in dims]]
    for pick in picks if picks[0] != picks[1] else picks[:1]:
        yield (tuple([sizes for sizes, _, _ in pick]), [a for _, own, _ in pick for a in own], [a for _, _, there in pick for a in there])


def first_view(here: Sequence[Dim], goal: Sequence[Dim], shape: Sequence[int], mesh: Mesh) -> View | None:
    """The first of ``views``."""
    dims = [_first_view_of(dim, want, size, mesh) for size, dim, want in zip(shape, here, goal, strict=True)]
    if None in dims:
        return None
    return tuple([sizes for sizes, _, _ in dims]), [a for _, own, _ in dims for a in own], [a for _, _, there in dims for a in there]  # type: ignore[misc]


@lru_cache(maxsize=65536)
def _first_view_of(dim: Dim, want: Dim, size: int, mesh: Mesh) -> tuple[tuple[int, ...], list[Axes], list[Axes]] | None:
    wanted = sized(want, size)
    sizes = tuple([n for n, _ in wanted])
    if (here := align(sized(dim, size), sizes, mesh)) is not None:
        return sizes, here, [axes for _, axes in wanted]
    return next(iter(_views_of(dim, want, size, mesh)), None)


@lru_cache(maxsize=65536)
def _views_of(dim: Dim, want: Dim, size: int, mesh: Mesh) -> list[tuple[tuple[int, ...], list[Axes], list[Axes]]]:
    own, wanted = sized(dim, size), sized(want, size)
    found = {}
    for sizes in [tuple([n for n, _ in parts]) for parts in (wanted, own)]:
        here, there = align(own, sizes, mesh), align(wanted, sizes, mesh)
        if here is not None and there is not None:
            found[sizes] = (sizes, here, there)
    if (seen := in_common(dim, want, size, mesh)) is not None:
        sizes, here, there = (list(column) for column in zip(*seen, strict=True))
        found[tuple(sizes)] = (tuple(sizes), here, there)
    return list(found.values())
