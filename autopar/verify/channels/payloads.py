"""Tell what a transfer of a local program puts on the wire: what its members, or both ends of a message, must agree about.

    y : f32[16 256] = all_gather(h, 1, tp, sizes=[128, 128])   →   dtype f32 · dim 1 · piece sizes [128 128] · shape [16 256]

A rank's own piece may have another size than those of the others. So the shape is that of the value with all pieces put together, and the
piece is compared with what all members say of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.ir import transfers
from autopar.ir.record import DTYPE_NAMES, TensorType

Payload = tuple[tuple[str, str], ...]  # (what it is, its value), for comparison and for errors
Piece = tuple[int, tuple[int, ...], str]  # a rank's own size, the sizes of all members, and the axis along which these are

# transfer → (what it is called in an error, the argument that says it, what it is without one)
AGREED: dict[Any, tuple[tuple[str, str, Any], ...]] = {
    transfers.all_reduce: (("reduction", "op", "sum"),),
    transfers.all_gather: (("dim", "dim", None), ("piece sizes", "sizes", None)),
    transfers.reduce_scatter: (("reduction", "op", "sum"), ("dim", "dim", None), ("piece sizes", "sizes", None)),
    transfers.all_to_all: (("source dim", "source", None), ("target dim", "target", None), ("piece sizes", "sizes", None),
                           ("new piece sizes", "new_sizes", None)),
    transfers.redistribute: tuple((name, name, None) for name in ("axis", "kept")),
}  # fmt: skip
ENDS = (("source splits", "source"), ("source parts", "source_parts"), ("splits", "splits"), ("parts", "parts"))
JOINED = {transfers.all_gather: "dim", transfers.all_to_all: "source"}  # the argument that names the dim along which pieces are put together


def payload_of(function: Any, given: Mapping[str, Any], operand: TensorType) -> Payload:
    """What all members of a collective say alike."""
    found = [("dtype", DTYPE_NAMES[operand.dtype])]
    if function in (transfers.all_reduce, transfers.reduce_scatter):
        found.append(("dtype of the reduction", DTYPE_NAMES[transfers.reduced_as(given.get("op", "sum"), operand.dtype)]))
    found += [(what, _text(given.get(name, default))) for what, name, default in AGREED[function]]
    if function is transfers.redistribute:
        return (*found, *_ends(given))
    view = _view(given, operand)
    if tuple(map(math.prod, view)) != operand.shape:
        return (*found, ("shape", f"{_text(operand.shape)}, which the parts {_text(view)} do not make"))
    if (name := JOINED.get(function)) is not None and given.get("sizes"):
        dim, place = _place(view, given[name])
        view[dim][place] = sum(given["sizes"])
    if given.get("parts"):
        found.append(("parts", _text(view)))
    return (*found, ("shape", _text([math.prod(dim) for dim in view] if function in JOINED else operand.shape)))


def message_payload(given: Mapping[str, Any], type: TensorType) -> Payload:
    """What both ends of a ``send`` and a ``recv`` say alike."""
    return (("dtype", DTYPE_NAMES[type.dtype]), *_ends(given))


def piece_of(function: Any, given: Mapping[str, Any], operand: TensorType) -> Piece | None:
    """The size of the rank's own piece, where members say the sizes of each other's."""
    if (name := JOINED.get(function)) is None or not given.get("sizes"):
        return None
    view = _view(given, operand)
    dim, place = _place(view, given[name])
    return view[dim][place], tuple(given["sizes"]), given["axis"]


def _ends(given: Mapping[str, Any]) -> Payload:
    return ("shape", _text(given.get("shape"))), *((what, _text(given.get(name))) for what, name in ENDS)


def _view(given: Mapping[str, Any], operand: TensorType) -> list[list[int]]:
    """The sizes of the parts that dims are made of, dim by dim."""
    return [list(dim) for dim in given.get("parts") or [(n,) for n in operand.shape]]


def _place(view: Sequence[Sequence[int]], number: int) -> tuple[int, int]:
    """Dim and part of a part that is counted over all dims."""
    return [(dim, k) for dim, parts in enumerate(view) for k in range(len(parts))][number]


def _text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"[{' '.join(map(_text, value))}]"
    return "none" if value is None else str(value)
