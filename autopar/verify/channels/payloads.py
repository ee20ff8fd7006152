"""Describe the payload of a transfer in a local program.

It is the facts on which all members of a group, or both ends of a message, must agree.

    y : f32[16 256] = all_gather(h, 1, tp, sizes=[128, 128])   →   dtype f32 · dim 1 · piece sizes [128 128] · shape [16 256]

Pieces of different ranks may differ in size. So the shape in the payload is that of the whole value, and each rank's
own piece is compared with the size that the members state for it.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.ir import transfers
from autopar.ir.record import DTYPE_NAMES, TensorType

Payload = tuple[tuple[str, str], ...]  # (name, value), for comparison and for errors
# the size of the rank's piece, the stated sizes of all members, and their axis
Piece = tuple[int, tuple[int, ...], str]

# transfer → (name in an error, argument, default)
AGREED: dict[Any, tuple[tuple[str, str, Any], ...]] = {
    transfers.all_reduce: (("reduction", "op", "sum"),),
    transfers.all_gather: (("dim", "dim", None), ("piece sizes", "sizes", None)),
    transfers.reduce_scatter: (("reduction", "op", "sum"), ("dim", "dim", None), ("piece sizes", "sizes", None)),
    transfers.all_to_all: (("source dim", "source", None), ("target dim", "target", None),
                           ("piece sizes", "sizes", None), ("new piece sizes", "new_sizes", None)),
    transfers.redistribute: tuple((name, name, None) for name in ("axis", "kept")),
}  # fmt: skip
ENDS = (("source splits", "source"), ("source parts", "source_parts"), ("splits", "splits"), ("parts", "parts"))
# the argument with the dim along which pieces are concatenated
JOINED = {transfers.all_gather: "dim", transfers.all_to_all: "source"}


def payload_of(function: Any, arguments: Mapping[str, Any], operand: TensorType) -> Payload:
    """Return the facts on which all members of a collective must agree."""
    facts = [("dtype", DTYPE_NAMES[operand.dtype])]
    if function in (transfers.all_reduce, transfers.reduce_scatter):
        facts.append(
            ("dtype of the reduction", DTYPE_NAMES[transfers.reduced_as(arguments.get("op", "sum"), operand.dtype)])
        )
    facts += [(label, _text(arguments.get(name, default))) for label, name, default in AGREED[function]]
    if function is transfers.redistribute:
        return (*facts, *_ends(arguments))
    view = _view(arguments, operand)
    if tuple(map(math.prod, view)) != operand.shape:
        return (*facts, ("shape", f"{_text(operand.shape)}, which the parts {_text(view)} do not make"))
    if (name := JOINED.get(function)) is not None and arguments.get("sizes"):
        dim, place = _place(view, arguments[name])
        view[dim][place] = sum(arguments["sizes"])
    if arguments.get("parts"):
        facts.append(("parts", _text(view)))
    return (*facts, ("shape", _text([math.prod(dim) for dim in view] if function in JOINED else operand.shape)))


def message_payload(arguments: Mapping[str, Any], type: TensorType) -> Payload:
    """Return the facts on which both ends of a ``send`` and a ``recv`` must agree."""
    return (("dtype", DTYPE_NAMES[type.dtype]), *_ends(arguments))


def piece_of(function: Any, arguments: Mapping[str, Any], operand: TensorType) -> Piece | None:
    """Return the size of the rank's own piece, if the members state the sizes of all pieces; else ``None``."""
    if (name := JOINED.get(function)) is None or not arguments.get("sizes"):
        return None
    view = _view(arguments, operand)
    dim, place = _place(view, arguments[name])
    return view[dim][place], tuple(arguments["sizes"]), arguments["axis"]


def _ends(arguments: Mapping[str, Any]) -> Payload:
    return ("shape", _text(arguments.get("shape"))), *((label, _text(arguments.get(name))) for label, name in ENDS)


def _view(arguments: Mapping[str, Any], operand: TensorType) -> list[list[int]]:
    """Return the part sizes of the operand, dim by dim."""
    return [list(dim) for dim in arguments.get("parts") or [(n,) for n in operand.shape]]


def _place(view: Sequence[Sequence[int]], number: int) -> tuple[int, int]:
    """Return (dim, part) of a part whose number counts the parts of all dims."""
    return [(dim, k) for dim, parts in enumerate(view) for k in range(len(parts))][number]


def _text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        numbers = set(map(type, value)) == {int}
        return f"[{' '.join(map(str if numbers else _text, value))}]"
    return "none" if value is None else str(value)
