"""Define the transfers: inserted ops that change a value's Layout, stage or dtype, and not the *global* value.

Each is a plain function, the target of an FX node, whose docstring shows Layouts *before → after*. Called on global
tensors it returns them unchanged (``cast`` changes the dtype), so an explicit program still runs on one device.
``TRANSFERS`` says how each changes the Layout; the runtime says how it moves the pieces.

``dim`` counts parts: it is the dim where no dim is merged; ``parts`` gives the part sizes, dim by dim, where one is.
At the levels ``local`` and ``scheduled`` further arguments tell a rank about the others: piece sizes (``sizes``),
because pieces may be uneven, or the Layouts at both ends (``Ends``); and the ``stage`` whose axes are meant, where it
is not the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx.node import Target

from autopar.errors import AutoparError, shown
from autopar.ir.boxes import most_lacked
from autopar.ir.layout import Axes, DistAttr, Layout, align, largest
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.ir.sizes import divides
from autopar.ir.subaxes import cut_pending, cut_towards, index_along, is_sub_axis, overlap

Parts = Sequence[Sequence[int]] | None
Meshes = Mapping[str | None, Mesh]  # stages by name; the program's own mesh is ``None``


def all_gather(
    x, dim: int, axis: str, parts: Parts = None, sizes: Sequence[int] | None = None, stage: str | None = None
):
    """Concatenate the pieces along ``axis``, which is the minor-most split of ``dim``: ``[32/dp 64] → [32 64]``."""
    return x


def slice(x, dim: int, axis: str, parts: Parts = None, sizes: Sequence[int] | None = None, stage: str | None = None):
    """Keep the rank's own piece, without communication: ``[32 64] → [32/dp 64]``."""
    return x


def all_reduce(x, axis: str | Axes, op: str = "sum", stage: str | None = None):
    """Reduce the partial results along ``axis``, or along several axes at once: ``[32 64] +tp → [32 64]``."""
    return x


def reduce_scatter(x, dim: int, axis: str, op: str = "sum", parts: Parts = None, sizes: Sequence[int] | None = None,
                   stage: str | None = None):  # fmt: skip
    """Reduce, and keep the rank's own piece: ``[32 64] +tp → [32/tp 64]``."""
    return x


def all_to_all(x, source: int, target: int, axis: str, parts: Parts = None,
               sizes: Sequence[int] | None = None, new_sizes: Sequence[int] | None = None,
               stage: str | None = None):  # fmt: skip
    """Move the minor-most split over ``axis`` from one dim to another: ``[32/tp 64] → [32 64/tp]``."""
    return x


def redistribute(x, splits: Sequence[Axes], parts: Parts = None, kept: Axes = (), axis: Axes | None = None,
                 shape: Sequence[int] | None = None, source: Sequence[Axes] | None = None, source_parts: Parts = None,
                 stage: str | None = None):  # fmt: skip
    """Change any splits to any others in one exchange: ``[32/dp 64/tp] → [32/tp 64/dp]``.

    A rank receives only what it lacks. ``splits`` are the axes of every part afterwards, ``source`` those before.
    Pending axes stay pending (``kept``). ``axis`` are the axes along which ranks exchange.
    """
    return x


def pend(x, axis: str, op: str = "sum", dim: int | None = None, parts: Parts = None, sizes: Sequence[int] | None = None,
         stage: str | None = None):  # fmt: skip
    """Make a pending value of a replicated one: ``[32 64] → [32 64] +tp``.

    The first rank along ``axis`` keeps it; others have zeros. With ``dim``, make it of pieces: ``[32/tp 64] → [32 64]
    +tp``. Each rank has its own piece among zeros. For another ``op``, the neutral elements replace the zeros: ones,
    infinities. A value that may be reduced with itself (max, min, avg) is kept by all ranks.
    """
    return x


def cast(x, dtype: torch.dtype):
    """Convert to another dtype: ``f32[32 64] → bf16[32 64]``."""
    return x.to(dtype)


def send(x, stage: str | None, splits: Sequence[Axes] | None = None, parts: Parts = None,
         shape: Sequence[int] | None = None, source: Sequence[Axes] | None = None, source_parts: Parts = None,
         home: str | None = None):  # fmt: skip
    """Send the pieces to ``stage`` (``None``: the whole mesh): ``[32 64] @s0 → [32 64] @s0``.

    Only ``recv`` may use the result. In a local program this ends an exchange on a rank that is only on ``home``.
    """
    return x


def recv(x, stage: str | None, splits: Sequence[Axes] | None = None, parts: Parts = None,
         shape: Sequence[int] | None = None, source: Sequence[Axes] | None = None, source_parts: Parts = None,
         home: str | None = None):  # fmt: skip
    """Receive a value on ``stage``, with ``splits``, or with those it had: ``[32 64] @s0 → [32 64] @s1``.

    In a local program this is the whole exchange on a rank of ``stage``; ``x`` is ``None`` if the rank is not on
    ``home``.
    """
    return x


def fold_in(x, axis: str | Axes, stage: str | None = None):
    """Derive a different seed for each piece along ``axis``; only in local programs."""
    return x


def wait(x):
    """Block the current stream until the started collective has finished: ``started → usable``."""
    return x


def join_chunks(x, shape: Sequence[int], dim: int | None = None, parts: Parts = None):
    """Put the chunks of a value together, which were sent one by one: ``[100], [28] → [32 4]``.

    Only in scheduled programs. ``shape`` is that of the result. With ``dim``, the chunks are those of a gather, a row
    for each rank, and the pieces of the ranks are concatenated along it.
    """
    return x


class LayoutMismatch(AutoparError, ValueError):
    """A transfer does not apply to the Layout of its operand."""


@dataclass(frozen=True)
class Transfer:
    """One row of the table ``TRANSFERS``: how the type changes, and which ranks take part.

    Attributes:
        function: the FX target.
        infer: ``(type, arguments, meshes) → type``; raises ``LayoutMismatch``.
        collective: whether ranks exchange data.
    """

    function: Callable[..., Any]
    infer: Callable[[TensorType, Mapping[str, Any], Meshes], TensorType]
    collective: bool

    @property
    def name(self) -> str:
        return self.function.__name__


def part_sizes(attr: DistAttr, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the part sizes of a value, dim by dim."""
    return tuple(tuple(n if s is None else s for s, _ in dim) for n, dim in zip(shape, attr.dims, strict=True))


def split_parts(
    attr: DistAttr, shape: Sequence[int], mesh: Mesh, parts: Parts, axis: str | None = None
) -> list[list[Axes]]:
    """Return the axes of every part, dim by dim, when the value is seen as ``parts`` (plain dims when ``None``).

    With ``axis``, a sub-axis, the axis of which it is a part is cut, so that it is among them.
    """
    sizes = [(n,) for n in shape] if parts is None else parts
    if len(sizes) != len(shape):
        raise LayoutMismatch(f"parts of {len(sizes)} dims are given for a value of {len(shape)}")
    out: list[list[Axes]] = []
    for n, dim, wanted in zip(shape, attr.dims, sizes, strict=True):
        sized_parts = [(n if size is None else size, axes) for size, axes in dim]
        if axis is not None and is_sub_axis(axis):
            sized_parts = [(size, _cut(size, axes, axis, mesh)) for size, axes in sized_parts]
        aligned = align(sized_parts, list(wanted), mesh)
        if aligned is None:
            raise LayoutMismatch(f"dim {_dim_text(sized_parts)} is not split as parts of {list(wanted)}")
        out.append(aligned)
    return out


def _cut(size: int, axes: Axes, towards: str, mesh: Mesh) -> Axes:
    """Return the axes of a part, of which one is cut into sub-axes; as they are, if that changes its pieces."""
    return cut_towards(axes, towards) if divides(mesh.count(axes), size) else axes


def join_parts(axes: Sequence[Sequence[Axes]], parts: Parts, pending: tuple[tuple[str, str], ...],
               shape: Sequence[int], mesh: Mesh) -> DistAttr:  # fmt: skip
    """Return the normalized attribute; the inverse of ``split_parts``."""
    sizes = [(n,) for n in shape] if parts is None else parts
    dims = tuple(tuple(zip(tuple(s), a, strict=True)) for s, a in zip(sizes, axes, strict=True))
    return DistAttr(dims, pending).normalize(shape, mesh)


def _dim_text(parts: Sequence[tuple[int, Axes]]) -> str:
    return " ".join("/".join([str(size), *axes]) for size, axes in parts)


def axes_of(axis: str | Axes) -> Axes:
    """Return the axes of a group, which an argument gives as a name or as several."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def _move(t: TensorType, parts: Parts, take: tuple[int, str] | None, give: tuple[int, str] | None,
          reduced: tuple[str | Axes, str] | None = None) -> TensorType:  # fmt: skip
    """Infer a type: take an axis from one part, give one to a part, and drop the reduced pending axes.

    The taken axis is the minor-most of its part.
    """
    assert t.layout is not None
    mesh, attr = t.layout.mesh, t.layout.attr
    axes = split_parts(attr, t.shape, mesh, parts, (take or give or (0, None))[1])
    flat = [(d, k) for d, dim in enumerate(axes) for k in range(len(dim))]
    for place in (take, give):
        if place is not None:
            mesh.check_axis(place[1])
            if not 0 <= place[0] < len(flat):
                raise LayoutMismatch(f"there is no dim {place[0]} in a value of {len(flat)}")
    if reduced is not None and not axes_of(reduced[0]):
        raise LayoutMismatch("a reduction needs at least one axis")
    if reduced is not None:
        check_kind(reduced[1], t.dtype)
    pending = dict(attr.pending)
    if reduced is not None:
        for axis in axes_of(reduced[0]):
            cut_pending(pending, mesh.check_axis(axis))
            if pending.pop(axis, None) != reduced[1]:
                raise LayoutMismatch(f"the value is not pending {reduced[1]} over {axis}")
    if take is not None:
        d, k = flat[take[0]]
        if axes[d][k][-1:] != (take[1],):
            raise LayoutMismatch(f"dim {take[0]} is not split over {take[1]} last")
        axes[d][k] = axes[d][k][:-1]
    if give is not None:
        used = (*pending, *(axis for dim in axes for part in dim for axis in part))
        if any(overlap(give[1], axis) for axis in used):
            raise LayoutMismatch(f"the value already uses the axis {give[1]}")
        d, k = flat[give[0]]
        axes[d][k] += (give[1],)
    new = join_parts(axes, parts, tuple(sorted(pending.items())), t.shape, mesh)
    return replace(t, layout=Layout(mesh, new))


def _pend(t: TensorType, axis: str, op: str, dim: int | None, parts: Parts) -> TensorType:
    assert t.layout is not None
    mesh = t.layout.mesh
    check_kind(op, t.dtype)
    if dim is not None:
        if op not in MERGES:
            raise LayoutMismatch(f"only a pending {' or '.join(MERGES)} can be made of pieces, no {op}")
        t = _move(t, parts, (dim, axis), None)
        assert t.layout is not None
    if mesh.check_axis(axis) in t.attr.axes:
        raise LayoutMismatch(f"the value already uses the axis {axis}")
    if others := {kind for _, kind in t.attr.pending} - {op}:
        raise LayoutMismatch(f"the value is pending {others.pop()} already; reductions of two kinds do not commute")
    pending = tuple(sorted((*t.attr.pending, (axis, op))))
    return replace(t, layout=Layout(mesh, replace(t.attr, pending=pending).normalize(t.shape, mesh)))


KINDS = ("sum", "avg", "max", "min", "prod")
MERGES = ("sum", "max", "min", "prod")  # kinds with a neutral element


REDUCED_AS = {  # dtypes that torch or a backend does not reduce → the dtype that is used instead
    torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.float32, torch.float8_e5m2: torch.float32,
}  # fmt: skip


def reduced_as(kind: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values are reduced.

    It is wider than ``dtype`` for an average in float16, whose sum may leave the range, and for a maximum of 16-bit
    floats, which is computed on integers of their width: backends have these from 32 bits on.
    """
    if (kind == "avg" and dtype is torch.float16) or (
        kind in ("max", "min") and dtype in (torch.float16, torch.bfloat16)
    ):
        return torch.float32
    return REDUCED_AS.get(dtype, dtype)


def is_gathered(kind: str, dtype: torch.dtype) -> bool:
    """Return whether partial values are gathered, and each rank reduces them: no backend multiplies complex numbers."""
    return kind == "prod" and dtype.is_complex


def check_kind(kind: str, dtype: torch.dtype) -> None:
    """Raise ``LayoutMismatch`` for an unknown reduction, and for one that the dtype does not have."""
    if kind not in KINDS:
        raise LayoutMismatch(f"there is no reduction {shown(kind)}; there are {', '.join(KINDS)}")
    if kind == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise LayoutMismatch(f"an average of {dtype} is no {dtype}; only floating point is averaged")
    if kind in ("max", "min") and dtype.is_complex:
        raise LayoutMismatch(f"complex numbers have no {kind}")
    if kind in ("max", "min") and dtype is torch.uint64:
        raise LayoutMismatch(f"torch finds no {kind} of {dtype}; cast the value first")


def _splits(
    shape: Sequence[int], splits: Sequence[Axes], parts: Parts, pending: tuple[tuple[str, str], ...], mesh: Mesh
) -> Layout:
    """Return the Layout with these ``splits`` of these ``parts``."""
    counts = [1] * len(shape) if parts is None else list(map(len, parts))
    if len(splits) != sum(counts) or len(counts) != len(shape):
        raise LayoutMismatch(f"{len(splits)} splits are given for {sum(counts)} parts")
    if negative := [size for sizes in parts or () for size in sizes if size < 0]:
        raise LayoutMismatch(
            f"the parts {parts} have the size {negative[0]}; a size is at least 0, and those of a dim multiply to it"
        )
    if parts is not None and any(math.prod(sizes) != n for sizes, n in zip(parts, shape, strict=True)):
        raise LayoutMismatch(f"the parts {parts} do not make the shape {list(shape)}")
    used = [mesh.check_axis(axis) for axes in splits for axis in axes] + [axis for axis, _ in pending]
    if twice := next((axis for axis in used if used.count(axis) > 1), None):
        raise LayoutMismatch(f"the axis {twice} would be used twice")
    rest = iter(splits)
    axes = [[tuple(next(rest)) for _ in range(n)] for n in counts]
    return Layout(mesh, join_parts(axes, parts, pending, shape, mesh))


def _redistribute(t: TensorType, a: Mapping[str, Any]) -> TensorType:
    assert t.layout is not None
    return replace(t, layout=_splits(t.shape, a["splits"], a.get("parts"), t.attr.pending, t.layout.mesh))


def _cast(t: TensorType, dtype: Any) -> TensorType:
    if not isinstance(dtype, torch.dtype):
        raise LayoutMismatch(f"{shown(dtype)} is no torch.dtype")
    return replace(t, dtype=dtype)


def _send(t: TensorType, stage: str | None, meshes: Meshes) -> TensorType:
    if t.attr.pending:
        raise LayoutMismatch("a pending value is reduced before it is sent")
    _check_stage(stage, meshes)
    return t


def _check_stage(stage: str | None, meshes: Meshes) -> str | None:
    if stage not in meshes:
        raise LayoutMismatch(
            f"there is no stage {shown(stage)}; stages are {', '.join(filter(None, meshes)) or 'none'}"
        )
    return stage


def _recv(t: TensorType, a: Mapping[str, Any], meshes: Meshes) -> TensorType:
    mesh = meshes[_check_stage(a["stage"], meshes)]
    if a.get("splits") is not None:
        return replace(t, layout=_splits(t.shape, a["splits"], a.get("parts"), (), mesh))
    for axis in t.attr.axes:
        mesh.check_axis(axis)
    return replace(t, layout=Layout(mesh, t.attr.normalize(t.shape, mesh)))


def flat_splits(attr: DistAttr, shape: Sequence[int]) -> tuple[tuple[Axes, ...], tuple[tuple[int, ...], ...] | None]:
    """Return a DistAttr as arguments of a transfer: the axes of every part, and the part sizes if a dim is merged."""
    parts = part_sizes(attr, shape)
    return tuple(axes for _, axes in attr.parts(shape)), parts if any(len(sizes) > 1 for sizes in parts) else None


@dataclass(frozen=True)
class Ends:
    """Both ends of an exchange in a local program: the global shape and the two Layouts.

    The exchange is a redistribute, a send or a recv.
    """

    shape: tuple[int, ...]
    source: Layout
    target: Layout

    @staticmethod
    def of(arguments: Mapping[str, Any], meshes: Meshes) -> Ends:
        """Read them from the arguments in a local program."""
        shape = tuple(arguments["shape"])
        target_mesh = meshes[arguments.get("stage")]
        source_mesh = meshes[arguments["home"]] if "home" in arguments else target_mesh
        source = _splits(shape, arguments["source"], arguments.get("source_parts"), (), source_mesh)
        return Ends(shape, source, _splits(shape, arguments["splits"], arguments.get("parts"), (), target_mesh))


TRANSFERS: dict[str, Transfer] = {
    row.name: row
    for row in (
        Transfer(all_gather, lambda t, a, s: _move(t, a.get("parts"), (a["dim"], a["axis"]), None), True),
        Transfer(slice, lambda t, a, s: _move(t, a.get("parts"), None, (a["dim"], a["axis"])), False),
        Transfer(all_reduce, lambda t, a, s: _move(t, part_sizes(t.attr, t.shape), None, None,
                                                   (a["axis"], a.get("op", "sum"))), True),
        Transfer(reduce_scatter, lambda t, a, s: _move(t, a.get("parts"), None, (a["dim"], a["axis"]),
                                                       (a["axis"], a.get("op", "sum"))), True),
        Transfer(all_to_all, lambda t, a, s: _move(t, a.get("parts"), (a["source"], a["axis"]),
                                                   (a["target"], a["axis"])), True),
        Transfer(redistribute, lambda t, a, s: _redistribute(t, a), True),
        Transfer(pend, lambda t, a, s: _pend(t, a["axis"], a.get("op", "sum"), a.get("dim"), a.get("parts")), False),
        Transfer(cast, lambda t, a, s: _cast(t, a["dtype"]), False),
        Transfer(send, lambda t, a, s: _send(t, a["stage"], s), True),
        Transfer(recv, lambda t, a, s: _recv(t, a, s), True),
        Transfer(fold_in, lambda t, a, s: t, False),
        Transfer(wait, lambda t, a, s: t, False),
        Transfer(join_chunks, lambda t, a, s: t, False),
    )
}  # fmt: skip

BY_FUNCTION: dict[Target, Transfer] = {row.function: row for row in TRANSFERS.values()}

_PARAMETERS: dict[Target, tuple[str, ...]] = {
    row.function: row.function.__code__.co_varnames[1 : row.function.__code__.co_argcount] for row in TRANSFERS.values()
}
_REQUIRED: dict[Target, int] = {
    row.function: row.function.__code__.co_argcount - 1 - len(row.function.__defaults__ or ())
    for row in TRANSFERS.values()
}


def arguments(function: Target, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a transfer node's arguments by name, without the operand."""
    return {**dict(zip(_PARAMETERS[function], args[1:], strict=False)), **kwargs}


def call(function: Target, x: Any, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a transfer node: those that a person would write by position, then the rest by name."""
    names = _PARAMETERS[function][: _REQUIRED[function]]
    return (x, *(arguments[name] for name in names if name in arguments)), {
        name: v for name, v in arguments.items() if name not in names
    }


def suffix(arguments: Mapping[str, Any]) -> str:
    """Return what a transfer adds to the name of its operand: its axes, its stage or its dtype."""
    if "splits" in arguments and "stage" not in arguments:
        return "relaid"
    if "axis" in arguments:
        return "_".join(axes_of(arguments["axis"])).replace(".", "_")
    if "stage" in arguments:
        return arguments["stage"] or "mesh"
    return str(arguments["dtype"]).removeprefix("torch.") if "dtype" in arguments else "wait"


def axes_along(function: Target, source: TensorType, arguments: Mapping[str, Any], result: TensorType) -> Axes:
    """Return the axes of a transfer; none between stages.

    For a redistribute they are those that split another place afterwards.
    """
    if "axis" in arguments:
        return axes_of(arguments["axis"])
    if function is not redistribute:
        return ()
    assert source.layout is not None
    before, after = ({axis: (d, k, n)
                      for d, dim in enumerate(t.attr.dims) for k, (_, axes) in enumerate(dim)
                      for n, axis in enumerate(axes)}
                     for t in (source, result))  # fmt: skip
    return tuple(axis for axis in source.layout.mesh.names if before.get(axis) != after.get(axis))


def received(function: Target, source: TensorType, arguments: Mapping[str, Any], result: TensorType) -> int:
    """Return the bytes that the worst rank receives.

    A reduction counts as a ring: ``(p-1)/p`` of the operand for a reduce-scatter (of padded pieces if they are uneven),
    and twice that for an all-reduce, in the dtype of the reduction. Other transfers count the elements that the worst
    rank lacks.
    """
    if function not in BY_FUNCTION or not BY_FUNCTION[function].collective or function is send or source.layout is None:
        return 0
    assert result.layout is not None
    if function in (all_reduce, reduce_scatter):
        mesh = source.layout.mesh
        elements_before, elements_after = (largest(t.attr, t.shape, mesh) for t in (source, result))
        p = mesh.count(axes_of(arguments["axis"]))
        elements = -(-2 * elements_before * (p - 1) // p) if function is all_reduce else elements_after * (p - 1)
        return elements * reduced_as(arguments.get("op", "sum"), source.dtype).itemsize
    return most_lacked(source.layout, result.layout, source.shape) * source.dtype.itemsize


def local_shape(function: Target, shape: Sequence[int], arguments: Mapping[str, Any],
                at: Mapping[str, int]) -> tuple[int, ...]:  # fmt: skip
    """Return the shape of a transfer's local result, from its operand's local shape and its explicit piece sizes.

    At the level ``local``, ``parts`` are the operand's local part sizes.
    """
    parts = [list(dim) for dim in (arguments.get("parts") or [(n,) for n in shape])]
    flat = [(d, k) for d, dim in enumerate(parts) for k in range(len(dim))]
    if function is pend and arguments.get("dim") is None:
        return tuple(shape)
    sizes = arguments["sizes"]
    d, k = flat[arguments["source"] if function is all_to_all else arguments["dim"]]
    if function in (all_gather, pend, all_to_all):
        parts[d][k] = sum(sizes)
    else:
        parts[d][k] = sizes[index_along(arguments["axis"], at)]
    if function is all_to_all:
        d, k = flat[arguments["target"]]
        parts[d][k] = arguments["new_sizes"][index_along(arguments["axis"], at)]
    return tuple(math.prod(dim) for dim in parts)
