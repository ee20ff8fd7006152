"""Decompose ops without a sharding rule by torch's own decompositions, if all of the resulting ops have rules.

torch has decompositions for hundreds of ops. One is used only if it helps: it is run once for each op and each kind of
arguments on fake tensors, outside of the trace, and the ops that it calls are decomposed in turn by torch and by
autopar. If an op without a rule is left, the original op stays as it is. Ops that draw random numbers are never
decomposed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar.capture.decompose.table import DECOMPOSITIONS, IDENTITIES, SYNONYMS
from autopar.rules.registry import RULES
from autopar.torch_private import (
    DATA_DEPENDENT,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    aten,
    draws_random,
    functional_name,
    is_seeded,
    mutates,
    present,
    prims,
    pytree,
    returns_alias,
    torch_decompositions,
    without_modes,
)

Decomposition = Callable[..., Any]

MOST = 40  # ops that one op may become; more cost more than they save


def _where(condition, a, b):
    """``where`` of numbers too, which take the dtype of the tensor beside them."""
    like = next((x for x in (a, b) if isinstance(x, torch.Tensor)), None)
    dtype = torch.result_type(a, b) if like is None else like.dtype
    full = (
        x if isinstance(x, torch.Tensor) else aten.full.default((), x, dtype=dtype, device=condition.device)
        for x in (a, b)
    )
    return aten.where.self(condition, *full)


# torch's references end in prims, which are stricter ops of aten: operands of one dtype, all dims named
UNARY = (
    "abs acos acosh asin asinh atan atanh bitwise_not ceil cos cosh digamma erf erfc exp exp2 expm1 floor lgamma log "
    "log10 log1p log2 neg reciprocal round rsqrt sign signbit sin sinh sqrt tan tanh trunc"
)
BINARY = "add sub mul eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor fmod remainder"
PRIMS: dict[Any, Decomposition] = present(
    {
        **{getattr(prims, name).default: getattr(aten, name).default for name in UNARY.split()},
        **{getattr(prims, name).default: getattr(aten, name).Tensor for name in BINARY.split()},
        prims.maximum.default: aten.maximum.default,
        prims.minimum.default: aten.minimum.default,
        prims.atan2.default: aten.atan2.default,
        prims.pow.default: aten.pow.Tensor_Tensor,
        prims.where.default: _where,
        # the prim rounds integers
        prims.div.default: lambda x, y: aten.div.Tensor(x, y) if x.is_floating_point() else NotImplemented,
        prims.convert_element_type.default: lambda x, dtype: aten.to.dtype(x, dtype),
        prims.sum.default: lambda x, dims, *, output_dtype=None: aten.sum.dim_IntList(x, dims, dtype=output_dtype),
        prims.amax.default: lambda x, dims, **_: aten.amax.default(x, dims),
        prims.amin.default: lambda x, dims, **_: aten.amin.default(x, dims),
    }
)


def decomposition_table() -> Mapping[Any, Decomposition]:
    """Return the decompositions for a capture: autopar's first, then torch's for ops without a rule."""
    theirs = {op: _Checked(op, how) for op, how in torch_decompositions().items() if _may_be_decomposed(op)}
    ours = {op: _Either(how, theirs[op]) if op in theirs else how for op, how in DECOMPOSITIONS.items()}
    return {**theirs, **PRIMS, **ours}


def _may_be_decomposed(op: Any) -> bool:
    """Return whether torch may decompose an op. Views and constants stay.

    A later op may write through a view, and a constant is a view of itself.
    """
    kept = op in RULES or op in IDENTITIES or op in SYNONYMS
    return isinstance(op, OpOverload) and not (kept or mutates(op) or is_seeded(op) or returns_alias(op))


class _Checked:
    """A decomposition of torch, used if all resulting ops have rules."""

    def __init__(self, op: OpOverload, how: Decomposition) -> None:
        self.op, self.how = op, how

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.op in RULES or uncovered(self.op, self.how, args, kwargs):
            return NotImplemented
        return self.how(*args, **kwargs)


class _Either:
    """autopar's decomposition; torch's if autopar's does not take the call."""

    def __init__(self, ours: Decomposition, theirs: Decomposition) -> None:
        self.ours, self.theirs = ours, theirs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.ours(*args, **kwargs)
        return self.theirs(*args, **kwargs) if result is NotImplemented else result


_UNCOVERED: dict[Any, frozenset[Any]] = {}


def uncovered(op: OpOverload, how: Decomposition, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> frozenset[Any]:
    """Return the ops without a rule that the decomposition of one call ends in.

    It is the op itself if the decomposition fails.
    """
    key = (op, _kind(args), _kind(tuple(kwargs.items())))
    without = _UNCOVERED.get(key)
    if without is None or (without and without & RULES.keys()):  # the missing rule may have been registered since
        without = _UNCOVERED[key] = _parts(op, how, args, kwargs)
    return without


def _kind(value: Any) -> Any:
    """Return the properties of an argument that may change how an op is decomposed."""
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.stride(), value.dtype, value.device)
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    return (type(value), value) if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


def _parts(op: OpOverload, how: Decomposition, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> frozenset[Any]:
    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    parts = _Parts()
    with without_modes(), torch.no_grad(), FakeTensorMode():
        fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, fake, (args, dict(kwargs)))
        try:
            with parts:
                result = how(*fake_args, **fake_kwargs)
        except (*DATA_DEPENDENT, RuntimeError, NotImplementedError, TypeError, ValueError):
            return frozenset({op})  # the op raises it again when it is traced as it is
    return frozenset({op}) if result is NotImplemented or parts.count > MOST else frozenset(parts.without)


class _Parts(TorchDispatchMode):
    """Decomposes the ops that are called, and notes those that stay without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.without: set[Any] = set()
        self.count = 0
        self._open: list[Any] = []  # ops being decomposed: a reference that calls its own op would never end

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # device queries: no node
            return func(*args, **kwargs)
        if func not in self._open and not draws_random(func, args, kwargs):
            self._open.append(func)
            try:
                with self:
                    result = self._apart(func, args, kwargs)
            finally:
                self._open.pop()
            if result is not NotImplemented:
                return result
        self.count += 1
        if not _has_rule(func):
            self.without.add(func)
        return func(*args, **kwargs)

    def _apart(self, op: Any, args: Any, kwargs: Any) -> Any:
        ours = DECOMPOSITIONS.get(op) or PRIMS.get(op)
        if ours is not None and (result := ours(*args, **kwargs)) is not NotImplemented:
            return result
        if _has_rule(op):
            return NotImplemented
        theirs = None if mutates(op) else torch_decompositions().get(op)
        if theirs is not None and (result := theirs(*args, **kwargs)) is not NotImplemented:
            return result
        return op.decompose(*args, **kwargs)  # a composite op, which arrives undecomposed under inference_mode


def _has_rule(op: Any) -> bool:
    return _functional(op) in RULES or op in IDENTITIES or op in SYNONYMS


def _functional(op: OpOverload) -> Any:
    """Return the functional variant, ``add.Tensor`` for ``add_.Tensor``: capture replaces the op by it."""
    if not mutates(op):
        return op
    packet, overload = functional_name(op)
    return getattr(getattr(getattr(torch.ops, op.namespace), packet, None), overload, op)
