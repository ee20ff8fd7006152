"""Run a bucket: send all its pieces as one flat tensor, by functional collectives that a second function waits for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.runtime.lowering.collectives import own_row, start_scatter
from autopar.torch_private import FUNCTIONAL, start_gather

Place = tuple[tuple[int, ...], int, tuple[int, ...]]
"""A piece of a bucket: its shape with merged dims split into their parts, the dim that is scattered or gathered, and
the shape of the result. It is a tuple of tuples, so that generated code can hold it."""


def start_bucket(pieces: list[torch.Tensor], op: str, group: str) -> torch.Tensor:
    return FUNCTIONAL.all_reduce_(torch.cat([piece.reshape(-1) for piece in pieces]), op, group)


def finish_bucket(started: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Wait for a bucket; return its members as views of the flat tensor."""
    flat = FUNCTIONAL.wait_tensor(started)
    return [
        piece.view(shape)
        for piece, shape in zip(flat.split([math.prod(shape) for shape in shapes]), shapes, strict=True)
    ]


def start_scatter_bucket(
    pieces: list[torch.Tensor], places: Sequence[Place], ranks: int, op: str, group: str
) -> torch.Tensor:
    """Start a bucket with one row per rank, which holds the rank's parts of all members."""
    rows = [
        torch.stack(piece.reshape(view).chunk(ranks, dim)).reshape(ranks, -1) if dim else piece.reshape(ranks, -1)
        for piece, (view, dim, _) in zip(pieces, places, strict=True)
    ]
    return start_scatter(torch.cat(rows, 1), op, group)


def finish_scatter_bucket(started: torch.Tensor, places: Sequence[Place], rank: int) -> list[torch.Tensor]:
    """Wait for a bucket; return the members as views of this rank's row. ``rank``: its index in the group."""
    row = own_row(started, rank)
    return [
        piece.view(shape)
        for piece, (_, _, shape) in zip(row.split([math.prod(shape) for _, _, shape in places]), places, strict=True)
    ]


def start_gather_bucket(pieces: list[torch.Tensor], ranks: int, group: str) -> torch.Tensor:
    return start_gather(torch.cat([piece.reshape(-1) for piece in pieces]).unsqueeze(0), ranks, group)


def finish_gather_bucket(started: torch.Tensor, places: Sequence[Place]) -> list[torch.Tensor]:
    rows = FUNCTIONAL.wait_tensor(started)  # [ranks, all pieces]
    columns = rows.split([math.prod(view) for view, _, _ in places], 1)
    return [
        torch.cat([piece.reshape(view) for piece in column.unbind()], dim).reshape(shape)
        if dim
        else column.reshape(shape)
        for column, (view, dim, shape) in zip(columns, places, strict=True)
    ]
