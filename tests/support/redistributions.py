"""Pieces made with ``torch.chunk`` alone, and calls of ``autopar.redistribute`` on each rank of real processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

import autopar
from autopar import DistAttr, Mesh


def chunked(whole: torch.Tensor, attr: DistAttr, mesh: Mesh, rank: int) -> torch.Tensor:
    """The piece of a rank where no dim is merged: chunk by chunk, axis by axis."""
    at = mesh.coordinates(rank)
    for d, dim in enumerate(attr.dims):
        for axis in dim[0][1]:
            pieces = torch.chunk(whole, mesh.sizes[axis], d) if whole.shape[d] else [whole] * mesh.sizes[axis]
            empty = whole.narrow(d, 0, 0)
            whole = pieces[at[axis]] if at[axis] < len(pieces) else empty
    return whole


def addends_of(attr: DistAttr, mesh: Mesh, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The sum of some addends, one for each point of the pending axes, and the piece of each rank."""
    axes = [axis for axis, _ in attr.pending]
    points = {tuple(at[axis] for axis in axes): None for at in mesh.points()}
    own = dict(zip(points, values, strict=False))
    pieces = [
        chunked(own[tuple(mesh.coordinates(rank)[axis] for axis in axes)], attr, mesh, rank) for rank in mesh.ranks
    ]
    return torch.stack(list(own.values())).sum(0), pieces


def called(mesh: Any, cases: Sequence[tuple[Sequence[torch.Tensor], Any, Any, Any]]) -> list[tuple[Any, Any]]:
    """For each case, given as pieces, layouts before and after, and the shape: this rank's new piece, and the gradient
    of its old one, if each new piece has the gradient 3; or the error."""
    found: list[tuple[Any, Any]] = []
    rank = distributed.get_rank()
    for pieces, source, target, shape in cases:
        piece = pieces[rank].clone().requires_grad_()
        try:
            made = autopar.redistribute(piece, mesh, source, target, shape=shape)
        except (ValueError, TypeError, RuntimeError) as error:
            found.append((type(error).__name__, str(error)))
        else:
            made.backward(torch.full_like(made, 3))
            found.append((made.detach(), piece.grad))
    return found


def pieces_of_all(pieces: list[torch.Tensor], mesh: Mesh) -> str:
    """The error of a rank that gives the pieces of all."""
    try:
        autopar.redistribute(pieces, mesh, ("dp",), (None,))
    except TypeError as error:
        return str(error)
    return ""
