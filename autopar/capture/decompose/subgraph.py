"""The ops that a function of ATen ops is made of, with their types: what an expansion puts in the place of one op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.capture.decompose.table import DECOMPOSITIONS
from autopar.ir.record import TensorType, ValueType
from autopar.torch_private import FakeTensorMode, OpOverload, TorchDispatchMode, pytree, without_function_modes


@dataclass(frozen=True)
class Ref:
    """A value: an operand of the function, or what an earlier step made; one of several where ``part`` says which."""

    step: int  # below 0: operand -step - 1
    part: int | None = None


@dataclass(frozen=True)
class SubgraphOp:
    """One op. Its arguments hold ``Ref`` where values stand."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    type: ValueType


@dataclass(frozen=True)
class Subgraph:
    """Steps in order, and which values the function returns."""

    steps: tuple[SubgraphOp, ...]
    results: tuple[Ref | None, ...]


_KNOWN: dict[Any, Subgraph] = {}


def subgraph(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> Subgraph:
    """Run ``function`` once on fake tensors; calls of equal shapes share the result.

    Args:
        args, kwargs: tensors are given as their types.
        device: where they are.
    """
    key = (function, repr((tuple(args), dict(kwargs))), device)
    if key not in _KNOWN:
        recorder = _Recorder()
        with without_function_modes(), FakeTensorMode(), torch.no_grad():
            given = pytree.tree_map_only(TensorType, lambda t: recorder.operand(t, device), (tuple(args), dict(kwargs)))
            with recorder:
                results = function(*given[0], **given[1])
        found = results if isinstance(results, (tuple, list)) else (results,)
        _KNOWN[key] = Subgraph(tuple(recorder.steps), tuple(None if r is None else recorder.refs[id(r)] for r in found))
    return _KNOWN[key]


class _Recorder(TorchDispatchMode):
    """Notes the ops that are called, by the tensors that they read and make."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[SubgraphOp] = []
        self.refs: dict[int, Ref] = {}
        self.kept: list[torch.Tensor] = []  # so that no two have one address
        self.operands = 0

    def operand(self, type: TensorType, device: torch.device) -> torch.Tensor:
        made = torch.empty(type.shape, dtype=type.dtype, device=device)
        self.operands += 1
        self._note(made, Ref(-self.operands))
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DECOMPOSITIONS:
            with self:
                found = DECOMPOSITIONS[func](*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        found = func(*args, **(kwargs or {}))
        if not isinstance(found, (torch.Tensor, tuple, list)):  # a question after a device or a dtype: no op
            return found
        args, given = pytree.tree_map_only(torch.Tensor, lambda t: self.refs[id(t)], (args, kwargs or {}))
        several = isinstance(found, (tuple, list))
        self.steps.append(SubgraphOp(func, tuple(args), given, tuple(map(_type, found)) if several else _type(found)))  # type: ignore[arg-type]
        for part, one in enumerate(found if several else (found,)):
            if one is not None:
                self._note(one, Ref(len(self.steps) - 1, part if several else None))
        return found

    def _note(self, tensor: torch.Tensor, ref: Ref) -> None:
        self.refs[id(tensor)] = ref
        self.kept.append(tensor)


def _type(tensor: torch.Tensor | None) -> TensorType | None:
    return None if tensor is None else TensorType(tuple(tensor.shape), tensor.dtype)
