"""Decide which collectives may share a message and be cut into chunks, and compute the bytes of largest pieces."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from autopar.ir import transfers
from autopar.ir.layout import span
from autopar.ir.nodes import operands, tensor_type
from autopar.ir.record import TensorType

SHARED = (transfers.all_reduce, transfers.reduce_scatter, transfers.all_gather)


def sends_nothing(function: Any, type: Any) -> bool:
    """Return whether an op is a collective of a value without elements, which each rank makes by itself."""
    row = transfers.BY_FUNCTION.get(function) if isinstance(type, TensorType) and 0 in type.shape else None
    return row is not None and row.collective


def may_share(node: fx.Node) -> bool:
    """Return whether a node of an explicit program is a collective that may share a message and be cut.

    A reduction may if the backend reduces in its own dtype. A gather or a reduce-scatter may if all pieces have one
    size.
    """
    if node.target not in SHARED or sends_nothing(node.target, tensor_type(node)):
        return False
    kind = transfers.arguments(node.target, node.args, node.kwargs).get("op", "sum")
    dtype = tensor_type(node).dtype
    is_plain = kind != "avg" and not transfers.is_gathered(kind, dtype) and dtype not in transfers.REDUCED_AS
    return is_plain and _is_even(node)


def _is_even(node: fx.Node) -> bool:
    """Return whether the pieces of a gather or a reduce-scatter have one size on all ranks."""
    if node.target is transfers.all_reduce:
        return True
    arguments, source = transfers.arguments(node.target, node.args, node.kwargs), tensor_type(operands(node)[0])
    parts = arguments.get("parts")
    split = transfers.split_parts(source.attr, source.shape, source.mesh, parts, arguments["axis"])
    splits = [axes for dim in split for axes in dim]
    sizes = [size for dim in parts for size in dim] if parts else source.shape
    dim = arguments["dim"]
    axes = (*splits[dim], arguments["axis"]) if node.target is transfers.reduce_scatter else splits[dim]
    return sizes[dim] % source.mesh.count(axes) == 0


def piece_bytes(type: TensorType) -> int:
    """Return the bytes of a value's largest piece."""
    if type.layout is None:
        return math.prod(type.shape) * type.dtype.itemsize
    mesh = type.layout.mesh
    first = dict.fromkeys(mesh.sizes, 0)
    parts = type.attr.parts(type.shape)
    return math.prod(span(size, axes, mesh, first)[1] for size, axes in parts) * type.dtype.itemsize
