"""Calls of ATen ops that torch's own samples make, forward and backward: real tensors, small ones, some a kind.

The samples are those of ``torch.testing``'s private database of ops; tried on 2.13. Nothing else reads it. What capture
takes apart is taken apart here too: the calls that come out of it are kept, and its results are compared with the op's.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from operands import Call

from autopar.capture.decompose.batch_norm import BATCH_NORM
from autopar.capture.decompose.table import DECOMPOSITIONS
from autopar.errors import CaptureError
from autopar.runtime.discovery.proof import difference
from autopar.torch_private import OpOverload, TorchDispatchMode, mutates, pytree

KINDS = (torch.float64, torch.complex128, torch.int64, torch.bool)  # of a sample's inputs: the first that the op takes
LARGEST = 500  # elements of one tensor
CALLS = 6  # of one overload, with different shapes or arguments
APART = 20  # calls of one overload that are taken apart
SAMPLES, OF_LISTS = 40, 3  # of one entry of the database; of one for lists of tensors, which are many
FREE = ("aten::log_sigmoid_forward",)  # its second result is for its own backward alone, which is another one here


@dataclass
class Samples:
    """What was seen.

    Attributes:
        calls: of each overload, by what tells them apart.
        apart: the overloads that were taken apart, and on how many calls.
        wrong: where that gave something else than the op.
    """

    calls: dict[OpOverload, dict[str, Call]] = field(default_factory=lambda: defaultdict(dict))
    apart: dict[OpOverload, int] = field(default_factory=lambda: defaultdict(int))
    wrong: list[str] = field(default_factory=list)

    def of(self, op: OpOverload) -> list[Call]:
        """Some calls; those with elements first."""
        return sorted(self.calls.get(op, {}).values(), key=_empty)[:CALLS]


class _Recorder(TorchDispatchMode):
    """Keeps calls with copies of their tensors, as they are before the call."""

    def __init__(self, samples: Samples) -> None:
        super().__init__()
        self.samples = samples

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DECOMPOSITIONS and func not in BATCH_NORM and (apart := self._apart(func, args, kwargs)) is not None:
            return apart
        kept = self.samples.calls[func]
        if len(kept) < 2 * CALLS and (key := _key(args, kwargs)) is not None and key not in kept:
            kept[key] = pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), (args, kwargs))
        return func(*args, **kwargs)

    def _apart(self, op: Any, args: Any, kwargs: Any) -> Any:
        """The op's own results, where it is taken apart; what it comes apart into is recorded."""
        if mutates(op) or self.samples.apart[op] >= APART or _key(args, kwargs) is None:
            return None
        try:
            with self:
                have = DECOMPOSITIONS[op](*args, **kwargs)
        except CaptureError:
            return None  # refused
        if have is NotImplemented:
            return None
        want = op(*args, **kwargs)
        self.samples.apart[op] += 1
        if op.name() not in FREE and "empty" not in op.name() and (why := _differ(have, want)):
            self.samples.wrong.append(f"{op.name()} of {_key(args, kwargs)}: {why}")
        return want


def _differ(have: Any, want: Any) -> str:
    for k, (a, b) in enumerate(zip(pytree.tree_leaves(have), pytree.tree_leaves(want), strict=True)):
        if isinstance(b, torch.Tensor):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                return f"result {k} is {a.dtype} {list(a.shape)}, not {b.dtype} {list(b.shape)}"
            if (far := difference(a.detach(), b.detach())) > 1e-10:
                return f"result {k} differs by {far:.3g}"
    return ""


def _key(args: Any, kwargs: Any) -> str | None:
    """What tells calls apart: shapes, dtypes and other arguments; of calls that are too large, or not dense,
    nothing."""
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


def _run(entry: Any, sample: Any, samples: Samples) -> None:
    given = [x for x in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]
    with _Recorder(samples):
        results = pytree.tree_leaves(entry.op(sample.input, *sample.args, **sample.kwargs))
        outputs = [x for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
        inputs = [x for x in given if x.requires_grad]
        if outputs and inputs:
            torch.autograd.grad(outputs, inputs, [torch.ones_like(x) for x in outputs], allow_unused=True)


@functools.cache
def sampled() -> Samples:
    """Some calls of every overload that is reached. The same ones in every run."""
    samples = Samples()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        for entry, count in _entries():
            torch.manual_seed(0)
            random.seed(0)
            dtype = next((d for d in KINDS if d in entry.supported_dtypes("cpu")), None)
            if dtype is None:
                continue
            differentiable = entry.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
            # the function itself: entry.sample_inputs looks at all of the stack first, for a message of its own
            for _, sample in zip(
                range(count), entry.sample_inputs_func(entry, "cpu", dtype, differentiable), strict=False
            ):
                try:
                    _run(entry, sample, samples)
                except Exception:  # whatever torch raises
                    continue  # not on CPU, or not differentiable so; what it called until then counts
    return samples


def _empty(call: Call) -> bool:
    return any(isinstance(x, torch.Tensor) and not x.numel() for x in pytree.tree_leaves(call))
