"""The batch of a step, cut into its micro-batches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.arguments import Arguments, bind_arguments
from autopar.shards import is_dtensor
from autopar.structure import unflatten

Call = tuple[tuple[Any, ...], dict[str, Any]]
COUNTED = "num_items_in_batch"  # of Hugging Face's losses: what they divide by, over all micro-batches


def as_call(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """The call that a batch is: ``step(batch)`` with a dict, tuple or list is the call with its parts, unless ``forward``
    takes a dict, tuple or list itself, which is then its only argument."""
    if len(args) != 1 or kwargs or not isinstance(args[0], (Mapping, tuple, list)):
        return args, dict(kwargs)
    (batch,) = args
    if isinstance(batch, Mapping):
        names = _names(getattr(model.forward, "__func__", model.forward))
        return ((), dict(batch)) if all(isinstance(key, str) and (not names or key in names or None in names) for key in batch) else (args, {})
    return tuple(batch), {}


@functools.lru_cache(maxsize=256)
def _names(forward: Callable[..., Any]) -> frozenset[str | None]:
    """The parameters of ``forward``; ``None`` stands for any keyword."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return frozenset({None})
    return frozenset(None if p.kind is p.VAR_KEYWORD else p.name for p in parameters)


def micro_batches(model: torch.nn.Module, call: Call, count: int) -> list[Arguments]:
    """The arguments of the micro-batches: each tensor whose dim 0 is as long as that of the first is cut into ``count`` equal pieces,
    what is no such tensor is the same for all.

    Raises:
        ValueError: ``count`` does not divide the batch.
    """
    arguments = bind_arguments(model, *call)
    length = next((len(tensor) for tensor in arguments.tensors if tensor.dim()), None)
    if length == 0:
        raise ValueError(f"a batch without rows has no loss ({_named(arguments, 0)}); leave it out")
    if count == 1:
        return [arguments]
    if length is None:
        raise ValueError(f"microbatches={count}, but no argument of the step is a tensor with a dim that could be cut; pass microbatches=1")
    if length % count:
        fitting = dict.fromkeys(n for n in (length - length % count, length + count - length % count) if n)
        fewer = max(n for n in range(1, count + 1) if length % n == 0)
        raise ValueError(
            f"{count} micro-batches do not divide a batch of {length} rows ({_named(arguments, length)}): "
            f"use a batch of {' or '.join(map(str, fitting))} rows, or microbatches={fewer}"
        )
    cut: list[list[Any]] = []
    names = iter(arguments.names)
    for value in arguments.flat:
        name = next(names) if isinstance(value, torch.Tensor) else ""
        if name and value.dim() and len(value) == length:
            if is_dtensor(value):
                raise ValueError(f"the argument {name} is a DTensor, which is not cut into micro-batches; pass plain tensors, or microbatches=1")
            cut.append(list(value.split(length // count)))
        else:
            cut.append([value] * count)
    pieces = [replace(arguments, flat=list(flat), tensors=[value for value in flat if isinstance(value, torch.Tensor)]) for flat in zip(*cut, strict=True)]
    return [_with_its_share(model, piece, count) for piece in pieces] if COUNTED in arguments.passed else pieces


def _with_its_share(model: torch.nn.Module, piece: Arguments, count: int) -> Arguments:
    args, kwargs = unflatten(piece.flat, piece.spec)
    if kwargs.get(COUNTED) is not None:
        kwargs[COUNTED] = _share(kwargs[COUNTED], count)
    return bind_arguments(model, args, kwargs)


def _share(items: Any, count: int) -> torch.Tensor:
    """The share of one micro-batch: the mean of what they divide by; a tensor, so that another number is no other program."""
    return torch.as_tensor(items, dtype=torch.get_default_dtype() if not isinstance(items, torch.Tensor) or not items.is_floating_point() else None) / count


def _named(arguments: Arguments, length: int) -> str:
    return ", ".join(name for name, tensor in zip(arguments.names, arguments.tensors, strict=True) if tensor.dim() and len(tensor) == length)
