"""Register lookup and causal-attention ops for ranks that hold a part of a dim.

The op gets the indices that the rank holds.

    embedding(table, ids)      table : f32[32000/tp 64]        look_up(table, ids, held)    held : i64[32000/tp]

``held`` lists the rank's indices in ascending order: a piece of ``arange(32000)``. The op returns zeros for other
indices, so that the ranks' results add up to the whole. ``rows`` lists the positions of the queries of a causal
attention, which masks later keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.torch_private import FLASH_FOR_CPU, assert_without_sync, aten

LIBRARY = torch.library.Library("autopar", "DEF")


def op(schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as ``torch.ops.autopar.…``, for tensors on every device."""

    def register(function: Callable[..., Any]) -> Any:
        LIBRARY.define(schema)
        LIBRARY.impl(function.__name__, function, "CompositeExplicitAutograd")
        return getattr(torch.ops.autopar, function.__name__).default

    return register


def _positions_in(index: torch.Tensor, held: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the position of each index in ``held`` (any position if it is missing), and whether it is in ``held``.

    All indices must be below ``size``; ``IndexError`` otherwise.
    """
    index = index.to(held.dtype).contiguous()
    _check_below(index, size, IndexError(f"index out of range: a dim of size {size} is looked up"))
    positions = torch.searchsorted(held, index).clamp_(max=held.numel() - 1)
    return positions, held.take(positions) == index


def _check_below(index: torch.Tensor, size: int, error: Exception) -> None:
    inside = ((index >= 0) & (index < size)).all()
    if index.device.type == "cpu" and not inside:
        raise error
    assert_without_sync(inside, str(error))


@op("within(Tensor index, int size) -> Tensor")
def within(index: torch.Tensor, size: int) -> torch.Tensor:
    """Return a copy of ``index``; ``RuntimeError`` if a value is below 0, or not below ``size``."""
    _check_below(
        index,
        size,
        RuntimeError(f"class values are not all between 0 and {size - 1}, as one_hot of {size} classes needs them"),
    )
    return index.clone()


@op("look_up(Tensor table, Tensor index, Tensor held, int size) -> Tensor")
def look_up(table: torch.Tensor, index: torch.Tensor, held: torch.Tensor, size: int) -> torch.Tensor:
    """Return ``table[index]``, with zeros for rows that are not held: ``[v d], [… ] → [… d]``."""
    if not held.numel():
        return table.new_zeros(*index.shape, *table.shape[1:])
    positions, is_held = _positions_in(index, held, size)
    return torch.nn.functional.embedding(positions, table).masked_fill_(~is_held.unsqueeze(-1), 0)


@op("look_up_backward(Tensor gradient, Tensor index, Tensor held, int size) -> Tensor")
def look_up_backward(gradient: torch.Tensor, index: torch.Tensor, held: torch.Tensor, size: int) -> torch.Tensor:
    """Return the gradient of the rows that are held: ``[… d], [… ] → [v d]``."""
    if not held.numel():
        return gradient.new_zeros(0, gradient.shape[-1])
    positions, is_held = _positions_in(index, held, size)
    return aten.embedding_dense_backward.default(
        gradient.masked_fill(~is_held.unsqueeze(-1), 0), positions, held.numel(), -1, False
    )


@op("gather_held(Tensor input, int dim, Tensor index, Tensor held, int size) -> Tensor")
def gather_held(input: torch.Tensor, dim: int, index: torch.Tensor, held: torch.Tensor, size: int) -> torch.Tensor:
    """Return ``input.gather(dim, index)``, with zeros for indices along ``dim`` that are not held."""
    if not held.numel():
        return input.new_zeros(index.shape)
    positions, is_held = _positions_in(index, held, size)
    return input.gather(dim, positions).masked_fill_(~is_held, 0)


@op("scatter_held(Tensor source, int dim, Tensor index, Tensor held, int size) -> Tensor")
def scatter_held(source: torch.Tensor, dim: int, index: torch.Tensor, held: torch.Tensor, size: int) -> torch.Tensor:
    """Return zeros with the held indices along ``dim``, and ``source`` added at ``index``."""
    shape = list(index.shape)
    shape[dim] = held.numel()
    zeros = source.new_zeros(shape)
    if not held.numel():
        return zeros
    positions, is_held = _positions_in(index, held, size)
    return zeros.scatter_add_(dim, positions, source.masked_fill(~is_held, 0))


def _causal_mask(rows: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask of a causal attention: 0 for keys up to the query's position, minus infinity for later ones."""
    places = torch.arange(keys.shape[-2], device=rows.device)
    return torch.zeros((), dtype=dtype, device=rows.device).where(rows.unsqueeze(-1) >= places, float("-inf"))


@op("causal_attention(Tensor query, Tensor key, Tensor value, Tensor rows, float? scale) -> (Tensor, Tensor)")
def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, scale: float | None
) -> Any:
    """Return the attention of the queries at the positions ``rows``, and the log-sum-exp of each row."""
    return FLASH_FOR_CPU[0](query, key, value, 0.0, False, attn_mask=_causal_mask(rows, key, query.dtype), scale=scale)


@op(
    "causal_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    "Tensor rows, float? scale) -> (Tensor, Tensor, Tensor)"
)
def causal_attention_backward(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                              out: torch.Tensor, logsumexp: torch.Tensor, rows: torch.Tensor,
                              scale: float | None) -> Any:  # fmt: skip
    mask = _causal_mask(rows, key, query.dtype)
    return FLASH_FOR_CPU[1](gradient, query, key, value, out, logsumexp, 0.0, False, attn_mask=mask, scale=scale)
