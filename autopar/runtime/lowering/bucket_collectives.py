"""Run a bucket: send all its pieces as one flat tensor, by functional collectives that a second function waits for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.runtime.lowering.collectives import own_row, start_scatter, wait
from autopar.torch_private import FUNCTIONAL, start_gather

Span = tuple[int, int, int] | None
"""The first element of a chunk, the one behind its last, and how many there are; ``None`` for a whole piece."""
Place = tuple[tuple[int, ...], int, tuple[int, ...], Span]
"""A piece of a bucket: its shape with merged dims split into their parts, the dim that is scattered or gathered, the
shape of the result, and the span of a chunk. It is a tuple of tuples, so that generated code can hold it."""


def start_bucket(pieces: list[torch.Tensor], spans: Sequence[Span], op: str, group: str) -> torch.Tensor:
    """Start an all-reduce of a bucket: one flat tensor with the elements of all members."""
    return FUNCTIONAL.all_reduce_(_flat(pieces, spans), op, group)


def _flat(pieces: Sequence[torch.Tensor], spans: Sequence[Span]) -> torch.Tensor:
    """Return the elements of pieces in a row, in memory of their own; of a chunk, those of its span."""
    rows = [
        piece.reshape(-1) if span is None else piece.reshape(-1)[span[0] : span[1]]
        for piece, span in zip(pieces, spans, strict=True)
    ]
    return torch.cat(rows) if len(rows) > 1 else rows[0].clone()


def finish_bucket(started: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Wait for a bucket; return its members as views of the flat tensor."""
    return _views(wait(started), shapes)


def _views(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    pieces = flat.split([math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def start_scatter_bucket(
    pieces: list[torch.Tensor], places: Sequence[Place], ranks: int, op: str, group: str
) -> torch.Tensor:
    """Start a bucket with one row per rank, which holds the rank's parts of all members."""
    rows = [
        torch.stack(piece.reshape(view).chunk(ranks, dim)).reshape(ranks, -1) if dim else piece.reshape(ranks, -1)
        for piece, (view, dim, *_) in zip(pieces, places, strict=True)
    ]
    rows = [row if span is None else row[:, span[0] : span[1]] for row, (*_, span) in zip(rows, places, strict=True)]
    return start_scatter(torch.cat(rows, 1), op, group)


def finish_scatter_bucket(started: torch.Tensor, places: Sequence[Place], rank: int) -> list[torch.Tensor]:
    """Wait for a bucket; return the members as views of this rank's row. ``rank``: its index in the group."""
    return _views(own_row(started, rank), [shape for _, _, shape, _ in places])


def start_gather_bucket(pieces: list[torch.Tensor], spans: Sequence[Span], ranks: int, group: str) -> torch.Tensor:
    """Start an all-gather of a bucket, ``[ranks, elements of all members]``."""
    return start_gather(_flat(pieces, spans).unsqueeze(0), ranks, group)


def finish_gather_bucket(started: torch.Tensor, places: Sequence[Place]) -> list[torch.Tensor]:
    """Wait for a bucket; return its members. A chunk has a row of elements for each rank."""
    rows = wait(started)  # [ranks, all pieces]
    columns = rows.split([math.prod(view) if span is None else span[1] - span[0] for view, _, _, span in places], 1)
    return [
        column if span is not None else gathered(column, view, dim, shape)
        for column, (view, dim, shape, span) in zip(columns, places, strict=True)
    ]


def gathered(rows: torch.Tensor, view: Sequence[int], dim: int, shape: Sequence[int]) -> torch.Tensor:
    """Return the whole tensor of which each row is a piece; pieces have one size."""
    if not dim:
        return rows.reshape(shape)
    return torch.cat([piece.reshape(view) for piece in rows.unbind()], dim).reshape(shape)


def join_chunks(chunks: list[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """Join the chunks of a reduction."""
    return torch.cat(chunks).reshape(shape)


def join_gathered_chunks(
    chunks: list[torch.Tensor], view: Sequence[int], dim: int, shape: Sequence[int]
) -> torch.Tensor:
    """Join the chunks of a gather, which have a row for each rank."""
    return gathered(torch.cat(chunks, 1), view, dim, shape)
