"""The transfers: inserted ops that re-lay, move or cast a value and are the identity on the *global* value.

Each is a plain function, the target of an FX node, whose docstring shows Layouts *before → after*. Called on global
tensors it returns them unchanged (``cast`` changes the dtype), so an explicit program still runs on one device. What a
transfer does to the pieces is written in the runtime; what it does to Layouts is written here, in ``TRANSFERS``.

``dim`` counts parts: it is the dim where no dim is merged; ``parts`` gives the part sizes, dim by dim, where one is.
The levels ``local`` and ``scheduled`` add explicit piece sizes (``sizes``), because pieces may be uneven.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.layout import Axes, DistAttr, Layout, align, span
from autopar.mesh import Mesh
from autopar.record import TensorType

Parts = Sequence[Sequence[int]] | None
Meshes = Mapping[str | None, Mesh]  # stages by name; the program's own mesh is ``None``


def all_gather(x, dim: int, axis: str, parts: Parts = None, sizes: Sequence[int] | None = None):
    """``[32/dp 64] → [32 64]``: concatenate the pieces along ``axis``, which is the minor-most split of ``dim``."""
    return x


def slice(x, dim: int, axis: str, parts: Parts = None, sizes: Sequence[int] | None = None):
    """``[32 64] → [32/dp 64]``: keep the own piece; nothing is sent."""
    return x


def all_reduce(x, axis: str, op: str = "sum"):
    """``[32 64] +tp → [32 64]``: reduce the partial results along ``axis``."""
    return x


def reduce_scatter(x, dim: int, axis: str, op: str = "sum", parts: Parts = None, sizes: Sequence[int] | None = None):
    """``[32 64] +tp → [32/tp 64]``: reduce, and keep the own piece."""
    return x


def all_to_all(x, source: int, target: int, axis: str, parts: Parts = None,
               sizes: Sequence[int] | None = None, new_sizes: Sequence[int] | None = None):  # fmt: skip
    """``[32/tp 64] → [32 64/tp]``: move the minor-most split over ``axis`` from one dim to another."""
    return x


def pend(x, axis: str):
    """``[32 64] → [32 64] +tp``: the first rank along ``axis`` keeps the value, the others hold zeros."""
    return x


def cast(x, dtype: torch.dtype):
    """``f32[32 64] → bf16[32 64]``."""
    return x.to(dtype)


def send(x, stage: str):
    """``[32 64] @s0 → [32 64] @s0``: hand the pieces to ``stage``; only a ``recv`` may use the result."""
    return x


def recv(x, stage: str):
    """``[32 64] @s0 → [32 64] @s1``: the pieces that were sent to ``stage``, lying there as they did before."""
    return x


def wait(x):
    """``started → usable``: block the own stream until the started collective has finished."""
    return x


class LayoutMismatch(ValueError):
    """A transfer does not apply to the Layout it is given."""


@dataclass(frozen=True)
class Transfer:
    """One row of the table: how the type changes, and which ranks take part.

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
    """The part sizes of a value, dim by dim."""
    return tuple(tuple(n if s is None else s for s, _ in dim) for n, dim in zip(shape, attr.dims, strict=True))


def split_parts(attr: DistAttr, shape: Sequence[int], mesh: Mesh, parts: Parts) -> list[list[Axes]]:
    """The axes of every part, dim by dim, when the value is seen as ``parts`` (plain dims when ``None``)."""
    sizes = [(n,) for n in shape] if parts is None else parts
    out: list[list[Axes]] = []
    for n, dim, wanted in zip(shape, attr.dims, sizes, strict=True):
        own = [(n if size is None else size, axes) for size, axes in dim]
        aligned = align(own, list(wanted), mesh)
        if aligned is None:
            raise LayoutMismatch(f"dim {_dim_text(own)} is not split as parts of {list(wanted)}")
        out.append(aligned)
    return out


def join_parts(axes: Sequence[Sequence[Axes]], parts: Parts, pending: tuple[tuple[str, str], ...],
               shape: Sequence[int], mesh: Mesh) -> DistAttr:  # fmt: skip
    """The inverse of ``split_parts``, normalized."""
    sizes = [(n,) for n in shape] if parts is None else parts
    dims = tuple(tuple(zip(tuple(s), a, strict=True)) for s, a in zip(sizes, axes, strict=True))
    return DistAttr(dims, pending).normalize(shape, mesh)


def _dim_text(parts: Sequence[tuple[int, Axes]]) -> str:
    return " ".join("/".join([str(size), *axes]) for size, axes in parts)


def _move(t: TensorType, parts: Parts, take: tuple[int, str] | None, give: tuple[int, str] | None,
          reduced: tuple[str, str] | None = None) -> TensorType:  # fmt: skip
    """Take the minor-most axis off one part, put it on another, drop a pending axis."""
    assert t.layout is not None
    mesh, attr = t.layout.mesh, t.layout.attr
    axes = split_parts(attr, t.shape, mesh, parts)
    flat = [(d, k) for d, dim in enumerate(axes) for k in range(len(dim))]
    for place in (take, give):
        if place is not None:
            mesh.check_axis(place[1])
            if not 0 <= place[0] < len(flat):
                raise LayoutMismatch(f"there is no dim {place[0]} in a value of {len(flat)}")
    pending = dict(attr.pending)
    if reduced is not None:
        axis, kind = reduced
        mesh.check_axis(axis)
        if pending.pop(axis, None) != kind:
            raise LayoutMismatch(f"the value is not pending {kind} over {axis}")
    if take is not None:
        d, k = flat[take[0]]
        if axes[d][k][-1:] != (take[1],):
            raise LayoutMismatch(f"dim {take[0]} is not split over {take[1]} last")
        axes[d][k] = axes[d][k][:-1]
    if give is not None:
        if give[1] in pending or any(give[1] in part for dim in axes for part in dim):
            raise LayoutMismatch(f"the value already uses the axis {give[1]}")
        d, k = flat[give[0]]
        axes[d][k] += (give[1],)
    new = join_parts(axes, parts, tuple(sorted(pending.items())), t.shape, mesh)
    return replace(t, layout=Layout(mesh, new))


def _pend(t: TensorType, axis: str) -> TensorType:
    assert t.layout is not None
    if t.layout.mesh.check_axis(axis) in t.attr.axes:
        raise LayoutMismatch(f"the value already uses the axis {axis}")
    pending = tuple(sorted((*t.attr.pending, (axis, "sum"))))
    mesh = t.layout.mesh
    return replace(t, layout=Layout(mesh, replace(t.attr, pending=pending).normalize(t.shape, mesh)))


def _recv(t: TensorType, stage: str | None, meshes: Meshes) -> TensorType:
    if stage not in meshes:
        raise LayoutMismatch(f"there is no stage {stage!r}; stages are {', '.join(filter(None, meshes)) or 'none'}")
    return replace(t, layout=Layout(meshes[stage], t.attr))


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
        Transfer(pend, lambda t, a, s: _pend(t, a["axis"]), False),
        Transfer(cast, lambda t, a, s: replace(t, dtype=a["dtype"]), False),
        Transfer(send, lambda t, a, s: t, True),
        Transfer(recv, lambda t, a, s: _recv(t, a["stage"], s), True),
        Transfer(wait, lambda t, a, s: t, False),
    )
}  # fmt: skip

BY_FUNCTION: dict[Callable[..., Any], Transfer] = {row.function: row for row in TRANSFERS.values()}

_PARAMETERS = {
    row.function: row.function.__code__.co_varnames[1 : row.function.__code__.co_argcount] for row in TRANSFERS.values()
}


def arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A transfer node's arguments by name, without the operand."""
    return {**dict(zip(_PARAMETERS[function], args[1:], strict=False)), **kwargs}


def call(function: Callable[..., Any], x: Any, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a transfer node: what a person would write by position, then the rest by name."""
    first = [name for name in _PARAMETERS[function] if name in given and name not in _BY_NAME]
    return (x, *(given[name] for name in first)), {name: value for name, value in given.items() if name in _BY_NAME}


_BY_NAME = ("op", "parts", "sizes", "new_sizes")


def suffix(given: Mapping[str, Any]) -> str:
    """What a transfer adds to the name of the value it serves: its axis, its stage or its dtype."""
    found = given.get("axis") or given.get("stage") or given.get("dtype")
    return str(found).removeprefix("torch.") if found is not None else "wait"


def received(function: Callable[..., Any], source: TensorType, given: Mapping[str, Any]) -> int:
    """Bytes that the rank with the largest piece receives.

    ``(p-1)/p`` of the larger side for a gather, a reduce-scatter or an all-to-all; twice that for an all-reduce (ring).
    """
    if function not in BY_FUNCTION or not BY_FUNCTION[function].collective or source.layout is None:
        return 0
    mesh = source.layout.mesh
    first = dict.fromkeys(mesh.sizes, 0)
    held = math.prod(span(size, axes, mesh, first)[1] for size, axes in source.attr.parts(source.shape))
    elements = 0 if function is send else held
    if "axis" in given:
        p = mesh.sizes[given["axis"]]
        elements = -(-held * (p - 1) * {all_gather: p, all_reduce: 2}.get(function, 1) // p)  # rounded up
    return elements * source.dtype.itemsize


def local_shape(function: Callable[..., Any], shape: Sequence[int], given: Mapping[str, Any],
                at: Mapping[str, int]) -> tuple[int, ...]:  # fmt: skip
    """The shape of a transfer's local result, from its operand's local shape and its explicit piece sizes.

    ``parts`` at the level ``local`` are the operand's local part sizes.
    """
    parts = [list(dim) for dim in (given.get("parts") or [(n,) for n in shape])]
    flat = [(d, k) for d, dim in enumerate(parts) for k in range(len(dim))]
    sizes = given["sizes"]
    if function is all_gather:
        d, k = flat[given["dim"]]
        parts[d][k] = sum(sizes)
    elif function in (slice, reduce_scatter):
        d, k = flat[given["dim"]]
        parts[d][k] = sizes[at[given["axis"]]]
    elif function is all_to_all:
        d, k = flat[given["source"]]
        parts[d][k] = sum(sizes)
        d, k = flat[given["target"]]
        parts[d][k] = given["new_sizes"][at[given["axis"]]]
    return tuple(math.prod(dim) for dim in parts)
