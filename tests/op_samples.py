"""Calls of ATen ops that torch's own samples make, forward and backward: real tensors, small ones, some a kind.

The samples are those of ``torch.testing``'s private database of ops; tried on 2.13. Nothing else reads it.
"""

from __future__ import annotations

import functools
import warnings
from collections import defaultdict
from typing import Any

import torch
from rule_calls import Call

from autopar.torch_private import OpOverload, TorchDispatchMode, pytree

KINDS = (torch.float64, torch.complex128, torch.int64, torch.bool)  # of a sample's inputs: the first that the op takes
LARGEST = 500  # elements of one tensor
CALLS = 6  # of one overload, with different shapes or arguments
SAMPLES, OF_LISTS = 40, 4  # of one entry of the database; of one for lists of tensors, which are many


class _Recorder(TorchDispatchMode):
    """Keeps calls with copies of their tensors, as they are before the call."""

    def __init__(self, calls: dict[OpOverload, dict[str, Call]]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kept = self.calls[func]
        if len(kept) < 2 * CALLS and (key := _key(args, kwargs)) is not None and key not in kept:
            kept[key] = pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _key(args: Any, kwargs: Any) -> str | None:
    """What tells calls apart: shapes, dtypes and other arguments; of calls that are too large, or not dense, nothing."""
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    if any(x.layout != torch.strided or x.numel() > LARGEST or x.device.type != "cpu" for x in tensors):
        return None
    return str([(x.dtype, list(x.shape)) if isinstance(x, torch.Tensor) else x for x in leaves])


def _entries() -> list[tuple[Any, int]]:
    """The entries, and how many samples of each."""
    from torch.testing._internal import common_methods_invocations as database

    lists = ("unary", "binary", "pointwise", "reduce", "other")
    of_lists = [entry for kind in lists for entry in getattr(database, f"foreach_{kind}_op_db")]
    return [*((entry, SAMPLES) for entry in database.op_db), *((entry, OF_LISTS) for entry in of_lists)]


def _run(entry: Any, sample: Any, calls: dict[OpOverload, dict[str, Call]]) -> None:
    given = [x for x in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]
    with _Recorder(calls):
        results = pytree.tree_leaves(entry.op(sample.input, *sample.args, **sample.kwargs))
        outputs = [x for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
        inputs = [x for x in given if x.requires_grad]
        if outputs and inputs:
            torch.autograd.grad(outputs, inputs, [torch.ones_like(x) for x in outputs], allow_unused=True)


@functools.cache
def sampled() -> dict[OpOverload, list[Call]]:
    """Some calls of every overload that is reached; those with elements first. The same ones in every run."""
    calls: dict[OpOverload, dict[str, Call]] = defaultdict(dict)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        for entry, count in _entries():
            torch.manual_seed(0)
            dtype = next((d for d in KINDS if d in entry.supported_dtypes("cpu")), None)
            if dtype is None:
                continue
            differentiable = entry.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
            for _, sample in zip(range(count), entry.sample_inputs("cpu", dtype, requires_grad=differentiable), strict=False):
                try:
                    _run(entry, sample, calls)
                except Exception:  # whatever torch raises
                    continue  # not on CPU, or not differentiable so; what it called until then counts
    return {op: sorted(kept.values(), key=_empty)[:CALLS] for op, kept in calls.items()}


def _empty(call: Call) -> bool:
    return any(isinstance(x, torch.Tensor) and not x.numel() for x in pytree.tree_leaves(call))
