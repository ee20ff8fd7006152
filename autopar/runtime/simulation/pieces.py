"""Cut a tensor into the pieces of a Layout, and join pieces to a tensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.errors import SimulationError
from autopar.ir.record import TensorType


def cut(tensor: torch.Tensor, type: TensorType, at: Mapping[str, int]) -> torch.Tensor:
    """Return the contiguous piece of a global tensor for the rank at coordinates ``at``."""
    assert type.layout is not None
    mesh = type.layout.mesh
    spans = type.attr.local_parts(type.shape, mesh, at)
    piece = _window(tensor, type, spans)
    return piece.reshape(type.attr.local_shape(type.shape, mesh, at)).contiguous()


def _window(tensor: torch.Tensor, type: TensorType, spans: list[tuple[int, int]]) -> torch.Tensor:
    view = tensor.reshape([size for size, _ in type.attr.parts(type.shape)])
    for dim, (start, size) in enumerate(spans):
        view = view.narrow(dim, start, size)
    return view


def join(pieces: Mapping[int, torch.Tensor], type: TensorType, name: str) -> torch.Tensor:
    """Join pieces, by rank, to the global tensor. Ranks that hold the same piece must agree.

    Raises:
        SimulationError: a value is still pending, or two ranks disagree by more than rounding.
    """
    assert type.layout is not None
    if type.attr.pending:
        raise SimulationError(f"{name} is still pending and has no global value; reduce it first")
    mesh = type.layout.mesh
    whole = torch.empty(type.shape, dtype=type.dtype, device=next(iter(pieces.values())).device)
    written: dict[tuple[tuple[int, int], ...], int] = {}
    for rank, piece in pieces.items():
        spans = type.attr.local_parts(type.shape, mesh, mesh.coordinates(rank))
        window = _window(whole, type, spans)
        piece = piece.reshape(window.shape)
        first = written.setdefault(tuple(spans), rank)
        if first == rank:
            window.copy_(piece)
        elif not agree(window, piece):
            raise SimulationError(f"ranks {first} and {rank} hold different values of the same piece of {name}")
    return whole


def agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal up to rounding."""
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    tolerance = torch.finfo(a.dtype).eps ** 0.5
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
