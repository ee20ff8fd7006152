"""Chain transfers: each with the type that it leads to and the bytes that it brings the worst rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from autopar.ir import transfers
from autopar.ir.layout import Dim, align, normal_dim, sized
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType

# -- draft -------------------------------------------------------------------------------------------------------------
#
# Price reductions without inferring types: a draft has the splits of a value and its first piece's lengths.
#
# A search compares many drafts. Types are inferred only for the draft that it chooses.


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
