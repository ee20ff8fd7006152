"""Capture a call again with inputs of other sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.capture.arguments import Arguments
from autopar.ir.program import Program


@dataclass(frozen=True, eq=False)
class AtSizes:
    """A call without the values of its tensors, to be captured at other sizes.

    Attributes:
        arguments: the arguments; tensors are on meta.
        trace: captures a call.
        grad: whether gradients were on.
    """

    arguments: Arguments
    trace: Callable[[Arguments], Program]
    grad: bool

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Input → shape."""
        return {
            name: tuple(tensor.shape) for name, tensor in zip(self.arguments.names, self.arguments.tensors, strict=True)
        }

    @property
    def integers(self) -> frozenset[str]:
        """The inputs with integers."""
        named = zip(self.arguments.names, self.arguments.tensors, strict=True)
        return frozenset(name for name, tensor in named if not tensor.is_floating_point() and not tensor.is_complex())

    def __call__(self, shapes: Mapping[str, Sequence[int]]) -> Program:
        """Return the traced program of the call with inputs of these shapes."""
        names = iter(self.arguments.names)
        leaves = [
            _like(leaf, shapes[next(names)]) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.arguments.flat
        ]
        with torch.set_grad_enabled(self.grad):
            return self.trace(self.arguments.with_leaves(leaves))


def at_sizes(arguments: Arguments, trace: Callable[[Arguments], Program]) -> AtSizes:
    """Return the call without the values of its tensors."""
    leaves = [_like(leaf, leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in arguments.flat]
    return AtSizes(arguments.with_leaves(leaves), trace, torch.is_grad_enabled())


def _like(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    empty = torch.empty(tuple(shape), dtype=tensor.dtype, device="meta")
    return empty.requires_grad_(tensor.requires_grad)
