"""Keep the device of a DTensor whose mesh this rank is not on.

Its piece is empty. What torch makes of it is a DTensor with an empty piece on the CPU (tried on 2.11 to 2.15), so that
``detach``, ``clone`` or an average would move a parameter of another stage from the device of the job.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.torch_private import dtensor_around

MOVES = frozenset({"to", "cpu", "cuda", "type", "type_as"})  # methods that may ask for another device


class Elsewhere(DTensor):
    """A DTensor on a mesh without this rank. What functions make of it is one, too, and stays on its device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, (tuple, list)) and any(type(value) is DTensor for value in result):
            device = _device(func, args, kwargs)
            return type(result)([_kept(value, device) for value in result])
        if type(result) is not DTensor:
            return result
        return args[0] if _is_in_place(func) else _kept(result, _device(func, args, kwargs))

    # also where functions of subclasses are disabled, as while a step runs

    def detach(self) -> Any:
        return self.__torch_function__(torch.Tensor.detach, (), (self,))

    def clone(self, **kwargs: Any) -> Any:
        return self.__torch_function__(torch.Tensor.clone, (), (self,), kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(torch.Tensor.to, (), (self, *args), kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = new = self.detach().clone().requires_grad_(self.requires_grad)
            vars(new).update(copy.deepcopy(vars(self), memo))
            new.grad = copy.deepcopy(self.grad, memo)
        return memo[id(self)]


class _Moved(torch.autograd.Function):
    """Gives a DTensor with an empty piece another device. Gradients of it are empty, too, and pass."""

    @staticmethod
    def forward(ctx: Any, value: DTensor, device: torch.device) -> Any:
        piece = torch.empty_like(value.to_local(), device=device)
        return dtensor_around(piece, value.device_mesh, value.placements, value.shape, value.stride(), Elsewhere)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _kept(value: Any, device: torch.device) -> Any:
    is_elsewhere = type(value) is DTensor and value.device_mesh.get_coordinate() is None
    return _Moved.apply(value, device) if is_elsewhere else value


def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _device(func: Any, args: Any, kwargs: Any) -> torch.device:
    """Return the device of what a function makes: the one that it is asked for, or that of the first operand."""
    first = next(
        x for given in (*args, *kwargs.values()) for x in (given if isinstance(given, (tuple, list)) else (given,))
        if isinstance(x, Elsewhere)
    )  # fmt: skip
    if getattr(func, "__name__", "") in MOVES and args[0] is first:
        moved: torch.Tensor = func(torch.empty(0, dtype=first.dtype, device=first.device), *args[1:], **kwargs)
        return moved.device
    return torch.device(kwargs.get("device") or first.device)
