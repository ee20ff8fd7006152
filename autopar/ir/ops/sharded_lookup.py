"""Ops that autopar adds to torch's: they are told which part of a dim a rank holds, and so come apart along it.

    embedding(table, ids)      table : f32[32000/tp 64]        look_up(table, ids, held)    held : i64[32000/tp]

``held`` numbers what is there, in ascending order: a piece of ``arange(32000)``. What is looked up and not there is zero, so
that the ranks' results sum up to the whole. ``rows`` numbers the queries of a causal attention, which sees no key behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.torch_private import FLASH_FOR_CPU, assert_without_sync

LIBRARY = torch.library.Library("autopar", "DEF")


def _op(schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as ``torch.ops.autopar.…``, for tensors on every device."""

    def register(function: Callable[..., Any]) -> Any:
        LIBRARY.define(schema)
        LIBRARY.impl(function.__name__, function, "CompositeExplicitAutograd")
        return getattr(torch.ops.autopar, function.__name__).default

    return register


def _own(index: torch.Tensor, held: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in ``held`` each index stands (anywhere, where it does not), and whether it does. All must be below ``size``."""
    index = index.to(held.dtype).contiguous()
    _check_below(index, size, IndexError(f"index out of range: a dim of size {size} is looked up"))
    own = torch.searchsorted(held, index).clamp_(max=held.numel() - 1)
    return own, held.take(own) == index


def _check_below(index: torch.Tensor, size: int, error: Exception) -> None:
    inside = ((index >= 0) & (index < size)).all()
    if index.device.type == "cpu" and not inside:
        raise error
    assert_without_sync(inside, str(error))


@_op("within(Tensor index, int size) -> Tensor")
def within(index: torch.Tensor, size: int) -> torch.Tensor:
    """``index``, all of whose values are from 0 up to below ``size``."""
    _check_below(index, size, RuntimeError(f"class values are not all between 0 and {size - 1}, as one_hot of {size} classes needs them"))
    return index.clone()


@_op("look_up(Tensor table, Tensor index, Tensor held, int size) -> Tensor")
def look_up(table: torch.Tensor, index: torch.Tensor, held: torch.Tensor, size: int) -> torch.Tensor:
    """``table[index]``: ``[v d], [… ] → [… d]``, zeros where a row is not held."""
    if not held.numel():
        return table.new_zeros(*index.shape, *table.shape[1:])
    own, there = _own(index, held, size)
    return torch.nn.functional.embedding(own, table).masked_fill_(~there.unsqueeze(-1), 0)


@_op("look_up_backward(Tensor gradient, Tensor index, Tensor held, int size) -> Tensor")
def look_up_backward(gradient: torch.Tensor, index: torch.Tensor, held: torch.Tensor, size: int) -> torch.Tensor:
    """The gradient of the rows that are held: ``[… d], [… ] → [v d]``."""
    if not held.numel():
        return gradient.new_zeros(0, gradient.shape[-1])
    own, there = _own(index, held, size)
    return torch.ops.aten.embedding_dense_backward(gradient.masked_fill(~there.unsqueeze(-1), 0), own, held.numel(), -1, False)


@_op("gather_held(Tensor input, int dim, Tensor index, Tensor held, int size) -> Tensor")
def gather_held(input: torch.Tensor, dim: int, index: torch.Tensor, held: torch.Tensor, size: int) -> torch.Tensor:
    """``input.gather(dim, index)``, zero where a place along ``dim`` is not held."""
    if not held.numel():
        return input.new_zeros(index.shape)
    own, there = _own(index, held, size)
    return input.gather(dim, own).masked_fill_(~there, 0)


@_op("scatter_held(Tensor source, int dim, Tensor index, Tensor held, int size) -> Tensor")
def scatter_held(source: torch.Tensor, dim: int, index: torch.Tensor, held: torch.Tensor, size: int) -> torch.Tensor:
    """Zeros along ``dim`` for all that is held, with ``source`` added where ``index`` says."""
    shape = list(index.shape)
    shape[dim] = held.numel()
    zeros = source.new_zeros(shape)
    if not held.numel():
        return zeros
    own, there = _own(index, held, size)
    return zeros.scatter_add_(dim, own, source.masked_fill(~there, 0))


def _seen(rows: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask of a causal attention: 0 for keys up to the query's own place, and minus infinity behind it."""
    places = torch.arange(keys.shape[-2], device=rows.device)
    return torch.zeros((), dtype=dtype, device=rows.device).where(rows.unsqueeze(-1) >= places, float("-inf"))


@_op("causal_attention(Tensor query, Tensor key, Tensor value, Tensor rows, float? scale) -> (Tensor, Tensor)")
def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, scale: float | None) -> Any:
    """Attention of the queries at the places ``rows``; the result, and the log-sum-exp of each row."""
    return FLASH_FOR_CPU[0](query, key, value, 0.0, False, attn_mask=_seen(rows, key, query.dtype), scale=scale)


@_op("causal_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor rows, "
     "float? scale) -> (Tensor, Tensor, Tensor)")  # fmt: skip
def causal_attention_backward(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
                              logsumexp: torch.Tensor, rows: torch.Tensor, scale: float | None) -> Any:  # fmt: skip
    mask = _seen(rows, key, query.dtype)
    return FLASH_FOR_CPU[1](gradient, query, key, value, out, logsumexp, 0.0, False, attn_mask=mask, scale=scale)
