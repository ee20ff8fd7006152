"""Record the ops that a function of ATen ops calls, with their types: an expansion puts them in the place of one op."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sympy import Symbol

from autopar.capture.decompose.symbols import Symbols
from autopar.capture.decompose.table import DECOMPOSITIONS
from autopar.ir.record import TensorType, ValueType
from autopar.ir.sizes import map_sizes, sizes_in
from autopar.torch_private import (
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    enable_python_dispatcher,
    pytree,
    without_function_modes,
)


@dataclass(frozen=True)
class Ref:
    """A value: an operand of the function, or the result of an earlier step.

    ``part`` is its position if the step has several results.
    """

    step: int  # below 0: operand -step - 1
    part: int | None = None


@dataclass(frozen=True)
class SubgraphOp:
    """One op. Its arguments hold a ``Ref`` for each value."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    type: ValueType


@dataclass(frozen=True)
class Subgraph:
    """The steps in order, and the values that the function returns."""

    steps: tuple[SubgraphOp, ...]
    results: tuple[Ref | None, ...]


_KNOWN: dict[Any, Subgraph] = {}


def subgraph(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> Subgraph:
    """Run ``function`` once on fake tensors, and return its ops; calls with equal arguments, types and devices share
    the result.

    Args:
        args, kwargs: the arguments, with a type in the place of each tensor.
        device: the device of the tensors.
    """
    values = _symbols(args, kwargs)
    key = (function, repr((tuple(args), dict(kwargs))), device, tuple(values.items()))
    if key not in _KNOWN:
        symbols = Symbols(values) if values else None
        recorder = _Recorder(symbols)
        mode = FakeTensorMode(shape_env=None if symbols is None else symbols.made)
        kernels = enable_python_dispatcher() if values else contextlib.nullcontext()
        with without_function_modes(), mode, torch.no_grad(), kernels:
            fakes = pytree.tree_map_only(TensorType, lambda t: recorder.operand(t, device), (tuple(args), dict(kwargs)))
            with recorder:
                results = function(*fakes[0], **fakes[1])
        if symbols is not None:
            symbols.refuse_conditions()
        returned = results if isinstance(results, (tuple, list)) else (results,)
        _KNOWN[key] = Subgraph(
            tuple(recorder.steps), tuple(None if r is None else recorder.refs[id(r)] for r in returned)
        )
    return _KNOWN[key]


class _Recorder(TorchDispatchMode):
    """Records the ops that are called, with references to the tensors that they read."""

    def __init__(self, symbols: Symbols | None = None) -> None:
        super().__init__()
        self.symbols = symbols
        self.steps: list[SubgraphOp] = []
        self.refs: dict[int, Ref] = {}
        self.alive: list[torch.Tensor] = []  # keeps the tensors alive, so that no two tensors have the same id
        self.operands = 0

    def operand(self, type: TensorType, device: torch.device) -> torch.Tensor:
        shape = type.shape if self.symbols is None else [self.symbols.traced(size) for size in type.shape]
        fake = torch.empty(shape, dtype=type.dtype, device=device)
        self.operands += 1
        self._note(fake, Ref(-self.operands))
        return fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DECOMPOSITIONS:
            with self:
                result = DECOMPOSITIONS[func](*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, (torch.Tensor, tuple, list)):  # queries of device and dtype are not recorded
            return result
        args, options = pytree.tree_map_only(torch.Tensor, lambda t: self.refs[id(t)], (args, kwargs or {}))
        if self.symbols is not None:
            args, options = map_sizes(tuple(args), self.symbols.size), map_sizes(options, self.symbols.size)
        several = isinstance(result, (tuple, list))
        self.steps.append(
            SubgraphOp(
                func,
                tuple(args),
                options,
                tuple(map(self._type, result)) if isinstance(result, (tuple, list)) else self._type(result),
            )
        )
        for part, tensor in enumerate(result if several else (result,)):
            if tensor is not None:
                self._note(tensor, Ref(len(self.steps) - 1, part if several else None))
        return result

    def _note(self, tensor: torch.Tensor, ref: Ref) -> None:
        self.refs[id(tensor)] = ref
        self.alive.append(tensor)

    def _type(self, tensor: torch.Tensor | None) -> TensorType | None:
        if tensor is None:
            return None
        size = int if self.symbols is None else self.symbols.size
        return TensorType(tuple(map(size, tensor.shape)), tensor.dtype)


def _symbols(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Symbol, int]:
    """Return the symbols in the shapes of types and in numbers, with their values."""
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    shapes = [leaf.shape if isinstance(leaf, TensorType) else leaf for leaf in leaves]
    return {each: value for size in sizes_in(shapes) for each, value in size.values.items()}
