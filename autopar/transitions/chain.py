"""Chain transfers, from splits to splits: each with the type that it leads to and the bytes that it brings a rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from autopar.ir import transfers
from autopar.ir.boxes import most_lacked
from autopar.ir.layout import Axes, Dim, align, in_common, normal_dim, sized
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType

Dims = tuple[Dim, ...]
Parts = tuple[tuple[int, ...], ...]  # part sizes, dim by dim
Cut = tuple[Any, int, str]  # a slice or a reduce-scatter: the function, the part and the axis


class Reduced(NamedTuple):
    """A value that is to be reduced, and the axes of the reduction.

    Attributes:
        pending: all axes over which the value is pending; ``axes`` are those of the reduction, in the order of the
            mesh.
        replicated: axes whose ranks hold replicas.
        elements: the size of the first piece, which is a largest one.
        itemsize: bytes of one element; ``sent`` is that in the dtype of the reduction.
        outermost: the first of ``axes``, whose links may be slow; "" without axes.
    """

    shape: tuple[int, ...]
    mesh: Mesh
    dims: Dims
    axes: tuple[str, ...]
    pending: frozenset[str]
    replicated: frozenset[str]
    kind: str
    elements: int
    itemsize: int
    sent: int
    outermost: str

    @staticmethod
    def of(start: TensorType, axes: Iterable[str]) -> Reduced:
        assert start.layout is not None
        mesh, pending, axes = start.layout.mesh, dict(start.attr.pending), tuple(axes)
        kind = pending[axes[0]] if axes else "sum"
        return Reduced(start.shape, mesh, start.attr.dims, axes, frozenset(pending),
                       frozenset(mesh.names) - frozenset(start.attr.axes), kind,
                       math.prod(first_lengths(start.attr.dims, start.shape, mesh)), start.dtype.itemsize,
                       transfers.reduced_as(kind, start.dtype).itemsize, axes[0] if axes else "")  # fmt: skip

    @property
    def draft(self) -> Draft:
        """The draft without any moves."""
        return Draft(self, self.dims, first_lengths(self.dims, self.shape, self.mesh))


class Draft(NamedTuple):
    """A sequence of slices and reductions, and the bytes that it brings the worst rank.

    Attributes:
        dims: the splits afterwards, in normal form.
        lengths: the lengths of the first piece, dim by dim.
        moves: function, part, axis (or the axes of an all-reduce), and the part sizes by which parts are counted.
        far: bytes of reductions over the outermost axis, without the gather that is half of an all-reduce.
        extra: the bytes that this draft must save to be chosen.
    """

    value: Reduced
    dims: Dims
    lengths: tuple[int, ...]
    moves: tuple[tuple[Any, int, Any, Parts], ...] = ()
    bytes: int = 0
    far: int = 0
    extra: int = 0

    @property
    def elements(self) -> int:
        """The elements of the first piece."""
        return math.prod(self.lengths)

    def cut(self, cuts: Iterable[Cut], parts: Parts) -> Draft:
        value, dims, lengths, moves, _, far, extra = self
        shape, mesh, paid = value.shape, value.mesh, self.bytes
        new, new_lengths, places = list(dims), list(lengths), places_of(parts)
        new_moves = list(moves)
        for function, place, axis in cuts:
            d, k = places[place]
            new[d], new_lengths[d] = _split_part(new[d], shape[d], mesh, parts[d], k, axis)
            if function is transfers.reduce_scatter:
                bytes = math.prod(new_lengths) * (mesh.sizes[axis] - 1) * value.sent
                paid += bytes
                far += bytes if axis == value.outermost else 0
            new_moves.append((function, place, axis, parts))
        return Draft(value, tuple(new), tuple(new_lengths), tuple(new_moves), paid, far, extra)

    def all_reduced(self, axes: list[str]) -> Draft:
        value = self.value
        count = value.mesh.count(axes)
        bytes = -(-2 * self.elements * (count - 1) // count) * value.sent
        far = bytes // (2 * value.mesh.count(set(axes) - {value.outermost})) if value.outermost in axes else 0
        return self._replace(
            moves=(*self.moves, (transfers.all_reduce, 0, tuple(axes), ())),
            bytes=self.bytes + bytes,
            far=self.far + far,
        )

    def transfers(self) -> list[Move]:
        """Return the moves as transfers with their arguments."""
        moves: list[Move] = []
        op = op_argument(self.value.kind)
        for function, place, axis, parts in self.moves:
            if function is transfers.all_reduce:
                moves.append((function, {"axis": axis[0] if len(axis) == 1 else axis, **op}))
            else:
                reduces = function is transfers.reduce_scatter
                moves.append(
                    (function, {"dim": place, "axis": axis, **(op if reduces else {}), **parts_argument(parts)})
                )
        return moves


def parts_of(dims: Dims, shape: tuple[int, ...]) -> Parts:
    return tuple([tuple([size if n is None else n for n, _ in dim]) for size, dim in zip(shape, dims, strict=True)])


@lru_cache(maxsize=65536)
def axes_of(dims: Dims) -> frozenset[str]:
    """Return the axes that split a value."""
    return frozenset([axis for dim in dims for _, axes in dim for axis in axes])


@lru_cache(maxsize=65536)
def places_of(parts: Parts) -> tuple[tuple[int, int], ...]:
    """Return (dim, index within the dim) of every part."""
    return tuple((d, k) for d, sizes in enumerate(parts) for k in range(len(sizes)))


def first_lengths(dims: Dims, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    return tuple([first_length(dim, size, mesh) for dim, size in zip(dims, shape, strict=True)])


@lru_cache(maxsize=65536)
def first_length(dim: Dim, size: int, mesh: Mesh) -> int:
    """Return the length of the first piece of a dim, which is a longest one."""
    length = 1
    for n, axes in sized(dim, size):
        for axis in axes:
            n = -(-n // mesh.sizes[axis])
        length *= n
    return length


@lru_cache(maxsize=65536)
def _split_part(dim: Dim, size: int, mesh: Mesh, sizes: tuple[int, ...], k: int, axis: str) -> tuple[Dim, int]:
    """View a dim as parts of ``sizes`` and split part ``k`` over one more axis.

    Return the dim, and the length of its first piece.
    """
    axes = align(sized(dim, size), sizes, mesh)
    assert axes is not None, (dim, sizes)
    split = normal_dim(
        tuple(
            [
                (n, (*part_axes, axis) if place == k else part_axes)
                for place, (n, part_axes) in enumerate(zip(sizes, axes, strict=True))
            ]
        ),
        size,
        mesh,
    )
    return split, first_length(split, size, mesh)


# -- chain -------------------------------------------------------------------------------------------------------------


Move = tuple[Any, dict[str, Any]]  # a transfer and its arguments after the operand
MANY = 16  # above so many choices of places, all axes take the same place


@dataclass(frozen=True)
class TransferStep:
    """One transfer of a sequence: its function, its arguments after the operand, the resulting type, and its bytes.

    ``bytes`` is how many the worst rank receives.
    """

    function: Any
    arguments: tuple[tuple[str, Any], ...]
    type: TensorType
    bytes: int


@dataclass(frozen=True)
class TransferChain:
    """Transfers that lead to a type, and the bytes that the worst rank receives.

    ``extra``: the bytes that the chain must save to be chosen.
    """

    type: TensorType
    steps: tuple[TransferStep, ...] = ()
    bytes: int = 0
    extra: int = 0

    def then(self, *moves: Move, meshes: transfers.Meshes = {}) -> TransferChain:  # noqa: B006
        type, steps, paid = self.type, list(self.steps), self.bytes
        for function, arguments_by_name in moves:
            arguments = tuple(arguments_by_name.items())
            step = _step(type, function, arguments) if not meshes else _new_step(type, function, arguments, meshes)
            if step.type == type and function is not transfers.send:
                continue
            type, paid = step.type, paid + step.bytes
            steps.append(step)
        return TransferChain(type, tuple(steps), paid, self.extra)


def _new_step(
    type: TensorType, function: Any, arguments: tuple[tuple[str, Any], ...], meshes: transfers.Meshes
) -> TransferStep:
    arguments_by_name = dict(arguments)
    after = transfers.BY_FUNCTION[function].infer(type, arguments_by_name, meshes)
    return TransferStep(function, arguments, after, transfers.received(function, type, arguments_by_name, after))


@lru_cache(maxsize=65536)
def _step(type: TensorType, function: Any, arguments: tuple[tuple[str, Any], ...]) -> TransferStep:
    """Return the step of a transfer on one mesh; cached, because alternatives often begin alike."""
    return _new_step(type, function, arguments, {})


def places_for(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Yield a place for each axis; if there are too many such choices, one place for all axes."""
    return itertools.product(range(count), repeat=axes) if count**axes <= MANY else ((k,) * axes for k in range(count))


def op_argument(kind: str) -> dict[str, Any]:
    return {} if kind == "sum" else {"op": kind}


def parts_argument(sizes: Sequence[Sequence[int]]) -> dict[str, Any]:
    return {"parts": sizes} if any(len(dim) > 1 for dim in sizes) else {}


# -- relayouts ---------------------------------------------------------------------------------------------------------
#
# Change the splits of a value, or its mesh, while pending axes stay pending.


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
