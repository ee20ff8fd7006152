"""Know the values of tensors that depend on the inputs of the call and on buffers alone.

What forward computes from these is computed with the tensors of the call too, function by function. The captured
step is for the values that forward reads of them. It computes them again in each call, and raises an error where they
differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.torch_private import (
    FakeTensor,
    is_transformed,
    pytree,
    storage_of,
    tensor_dict,
    without_function_modes,
    without_modes,
)

COPIED = 2**20  # elements of an input that forward may write into and whose values are known afterwards


class KnownValues:
    """Computes beside a forward on stand-ins.

    Args:
        real: stand-in → the tensor of the call that it stands for.
        buffers: those of buffers. One that forward writes into has other values in each call, so they are not known.
    """

    def __init__(self, real: Mapping[torch.Tensor, torch.Tensor], buffers: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self._values: Any = tensor_dict()
        self._of_given: Any = tensor_dict()  # what was computed from ``real``
        self._lost: set[int] = set()  # storages that something unknown has been written into
        self._given: set[int] = set()  # storages of the caller
        with without_modes(), without_function_modes():
            for stand_in, tensor in real.items():
                self._of_given[stand_in] = True
                if not tensor.is_meta and not isinstance(tensor, FakeTensor):
                    self._values[stand_in] = value = tensor.detach()
                    if tensor.numel() <= COPIED:
                        self._values[stand_in] = value.clone()
                    else:
                        self._given.add(storage_of(value))
            kept = [self._values[stand_in] for stand_in in buffers if stand_in in self._values]
            self._buffers = {storage_of(value) for value in kept}

    def number(self, tensor: torch.Tensor) -> bool | int | float | None:
        """Return the one number in a tensor; ``None`` if it is not known."""
        value = self._value(tensor)
        if value is None or value.numel() != 1:
            return None
        with without_modes(), without_function_modes():
            return value.item()

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor; ``None`` if they are not known."""
        return self._value(tensor)

    def is_given(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was computed from what stand-ins stand for, and not from constants alone."""
        return tensor in self._of_given

    def follow(self, function: Any, args: Any, kwargs: Any, result: Any, writes: bool) -> None:
        """Compute what forward has computed, if its operands are known and it draws no random numbers."""
        operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        values = [value for value in map(self._value, operands) if value is not None]
        # the caller's own tensor stays as it is, and the next call finds what is written into a buffer
        if len(values) < len(operands) or (writes and storage_of(values[0]) in (self._given | self._buffers)):
            if writes:
                self.forget(args[0])
            return
        with without_modes(), without_function_modes(), torch.no_grad():
            known, named = pytree.tree_map_only(torch.Tensor, self._value, (tuple(args), dict(kwargs)))
            try:
                done = function(*known, **named)
            except Exception:  # another mode of the user's changes how forward calls it
                self.forget(args[0] if args else None)
                return
        for made, value in zip(pytree.tree_leaves(result), pytree.tree_leaves(done), strict=True):
            if isinstance(made, torch.Tensor):
                self._values[made] = value
                if any(operand in self._of_given for operand in operands):
                    self._of_given[made] = True

    def forget(self, tensor: Any) -> None:
        """Forget a tensor that something unknown is written into, and all that share its memory."""
        if isinstance(tensor, torch.Tensor) and is_transformed(tensor):
            self._values.clear()  # torch.func does not say whose memory it writes into
        value = self._value(tensor)
        if value is not None:
            self._lost.add(storage_of(value))

    def _value(self, tensor: Any) -> torch.Tensor | None:
        value = self._values.get(tensor) if isinstance(tensor, torch.Tensor) else None
        if value is None and type(tensor) is torch.Tensor and not tensor.is_meta and not is_transformed(tensor):
            value = tensor  # a constant of the model, which is guarded
        return None if value is None or storage_of(value) in self._lost else value
