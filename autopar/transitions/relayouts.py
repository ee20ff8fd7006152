"""Change the splits of a value, or its mesh, while pending axes stay pending."""

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
from autopar.transitions.chain import Move, TransferChain, parts_argument


def append_relayout(chain: TransferChain, goal: TensorType) -> TransferChain:
    """Append transfers to the splits and dtype of ``goal``; pending axes stay pending.

    The cast comes where fewer bytes move.
    """
    source = chain.type
    assert source.layout is not None and goal.layout is not None
    narrow = source.dtype.itemsize >= goal.dtype.itemsize
    if source.layout.mesh != goal.layout.mesh:
        return _append_messages(chain, goal, narrow)
    return _append(chain, goal, _exchange(*_as_bytes(source, goal)), narrow)


def relayouts(chain: TransferChain, goal: TensorType) -> Iterator[TransferChain]:
    """Yield a chain with each of the ways to the splits and dtype of ``goal``, with the cast at different places."""
    source = chain.type
    assert source.layout is not None and goal.layout is not None
    for early in (False, True) if source.dtype != goal.dtype else (False,):
        if source.layout.mesh != goal.layout.mesh:
            yield _append_messages(chain, goal, early)
        else:
            for moves in _exchanges(*_as_bytes(source, goal)):
                yield _append(chain, goal, moves, early)


def _as_bytes(*types: TensorType) -> Iterator[TensorType]:
    """Which exchanges there are does not depend on the dtype."""
    return (replace(type, dtype=torch.uint8) for type in types)


def _append_messages(chain: TransferChain, goal: TensorType, early: bool) -> TransferChain:
    splits, parts = transfers.flat_splits(goal.attr, goal.shape)
    stage = goal.mesh.name
    between: list[Move] = [
        (transfers.send, {"stage": stage}),
        (transfers.recv, {"stage": stage, "splits": splits, **({} if parts is None else {"parts": parts})}),
    ]
    cast = _cast(chain.type, goal)
    return chain.then(*([*cast, *between] if early else [*between, *cast]), meshes={stage: goal.mesh})


def _append(chain: TransferChain, goal: TensorType, moves: tuple[Move, ...], early: bool) -> TransferChain:
    """Append moves, with the cast before the first exchange or at the end."""
    first = next((k for k, (function, _) in enumerate(moves) if transfers.BY_FUNCTION[function].collective), len(moves))
    at = first if early else len(moves)
    return chain.then(*moves[:at], *_cast(chain.type, goal), *moves[at:])


def _cast(source: TensorType, goal: TensorType) -> list[Move]:
    return [(transfers.cast, {"dtype": goal.dtype})] if source.dtype != goal.dtype else []


@lru_cache(maxsize=65536)
def _exchange(source: TensorType, goal: TensorType) -> tuple[Move, ...]:
    """Return slices with one exchange or with gathers, or one redistribute if that brings a rank fewer bytes.

    Several gathers cross a slow link once with data that several ranks need; several exchanges of another kind are
    merged into one.
    """
    if source.layout == goal.layout:
        return ()
    assert source.layout is not None and goal.layout is not None
    least = most_lacked(source.layout, goal.layout, source.shape)
    chains = []
    for parts, have, want in views(source.attr.dims, goal.attr.dims, source.shape, source.layout.mesh):
        moves = _chain(have, want, parts_argument(parts))
        exchanges = [function for function, _ in moves or () if transfers.BY_FUNCTION[function].collective]
        if moves is not None and (len(exchanges) < 2 or set(exchanges) == {transfers.all_gather}):
            chain = TransferChain(source).then(*moves)
            if chain.type == goal and chain.bytes <= least:
                chains.append(tuple((step.function, dict(step.arguments)) for step in chain.steps))
    return min(chains, key=len) if chains else _redistribute(goal)


def _redistribute(goal: TensorType) -> tuple[Move, ...]:
    splits, sizes = transfers.flat_splits(goal.attr, goal.shape)
    return ((transfers.redistribute, {"splits": splits, **({} if sizes is None else {"parts": sizes})}),)


@lru_cache(maxsize=4096)
def _exchanges(source: TensorType, goal: TensorType) -> tuple[tuple[Move, ...], ...]:
    """Return the chain of each view, and one redistribute."""
    if source.layout == goal.layout:
        return ((),)
    assert source.layout is not None and goal.layout is not None
    found: dict[tuple[object, ...], tuple[Move, ...]] = {}
    for parts, have, want in views(source.attr.dims, goal.attr.dims, source.shape, source.layout.mesh):
        chain = TransferChain(source).then(*(_chain(have, want, parts_argument(parts)) or ()))
        if chain.type == goal:
            found[chain.steps] = tuple((step.function, dict(step.arguments)) for step in chain.steps)
    return (*found.values(), _redistribute(goal))


def _chain(have_axes: list[Axes], want_axes: list[Axes], parts: dict[str, Any]) -> list[Move] | None:
    """Return slices, then all-to-alls, then gathers; ``None`` if a gathered axis would be split again."""
    moves: list[Move] = []
    homes = {axis: place for place, axes in enumerate(want_axes) for axis in axes}
    while have_axes != want_axes:
        used = {axis for axes in have_axes for axis in axes}
        move: Move | None = None
        for place, (have, want) in enumerate(zip(have_axes, want_axes, strict=True)):
            if len(have) < len(want) and have == want[: len(have)] and want[len(have)] not in used:
                move, have_axes[place] = (
                    (transfers.slice, {"dim": place, "axis": want[len(have)], **parts}),
                    want[: len(have) + 1],
                )
                break
        if move is None:
            loose = [
                k for k, (have, want) in enumerate(zip(have_axes, want_axes, strict=True)) if have != want[: len(have)]
            ]
            for place in loose:
                axis = have_axes[place][-1]
                home = homes.get(axis, place)
                if home != place and (*have_axes[home], axis) == want_axes[home][: len(have_axes[home]) + 1]:
                    move = (transfers.all_to_all, {"source": place, "target": home, "axis": axis, **parts})
                    have_axes[place], have_axes[home] = have_axes[place][:-1], (*have_axes[home], axis)
                    break
            if move is None:
                free = [place for place in loose if have_axes[place][-1] not in homes]
                if not free:
                    return None
                move = (transfers.all_gather, {"dim": free[0], "axis": have_axes[free[0]][-1], **parts})
                have_axes[free[0]] = have_axes[free[0]][:-1]
        moves.append(move)
    return moves


# part sizes; the axes of every part, in the value and in the goal
View = tuple[tuple[tuple[int, ...], ...], list[Axes], list[Axes]]


def views(source: Sequence[Dim], goal: Sequence[Dim], shape: Sequence[int], mesh: Mesh) -> Iterator[View]:
    """Yield views of both Layouts in common parts, dim by dim.

    The first dims are in the goal's, the value's or the finest parts, and then all are in the finest. In the finest
    parts every axis is the minor-most split of a part: ``8/dp/tp`` is ``2/dp 2/tp 2``.
    """
    dims = [views_of(dim, want, size, mesh) for size, dim, want in zip(shape, source, goal, strict=True)]
    if not all(dims):
        return
    picks = [[views[0] for views in dims], [views[-1] for views in dims]]
    for pick in picks if picks[0] != picks[1] else picks[:1]:
        yield (
            tuple([sizes for sizes, _, _ in pick]),
            [a for _, have, _ in pick for a in have],
            [a for _, _, wanted in pick for a in wanted],
        )


def first_view(source: Sequence[Dim], goal: Sequence[Dim], shape: Sequence[int], mesh: Mesh) -> View | None:
    """Return the first of ``views``, or ``None``."""
    found = [_first_view_of(dim, want, size, mesh) for size, dim, want in zip(shape, source, goal, strict=True)]
    dims = [view for view in found if view is not None]
    if len(dims) < len(found):
        return None
    return (
        tuple([sizes for sizes, _, _ in dims]),
        [a for _, have, _ in dims for a in have],
        [a for _, _, wanted in dims for a in wanted],
    )


@lru_cache(maxsize=65536)
def _first_view_of(dim: Dim, want: Dim, size: int, mesh: Mesh) -> tuple[tuple[int, ...], list[Axes], list[Axes]] | None:
    wanted = sized(want, size)
    sizes = tuple([n for n, _ in wanted])
    if (have := align(sized(dim, size), sizes, mesh)) is not None:
        return sizes, have, [axes for _, axes in wanted]
    return next(iter(views_of(dim, want, size, mesh)), None)


@lru_cache(maxsize=65536)
def views_of(dim: Dim, want: Dim, size: int, mesh: Mesh) -> list[tuple[tuple[int, ...], list[Axes], list[Axes]]]:
    have, want_parts = sized(dim, size), sized(want, size)
    views = {}
    for sizes in [tuple([n for n, _ in parts]) for parts in (want_parts, have)]:
        have_axes, want_axes = align(have, sizes, mesh), align(want_parts, sizes, mesh)
        if have_axes is not None and want_axes is not None:
            views[sizes] = (sizes, have_axes, want_axes)
    if (common := in_common(dim, want, size, mesh)) is not None:
        columns: tuple[list[int], list[Axes], list[Axes]]
        columns = ([row[0] for row in common], [row[1] for row in common], [row[2] for row in common])
        views[tuple(columns[0])] = (tuple(columns[0]), columns[1], columns[2])
    return list(views.values())
