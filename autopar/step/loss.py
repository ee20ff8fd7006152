"""The loss of a step: a number whose backward has run.

It is a tensor as any other, without a graph behind it, and so are the sums and means that people make of it. Only ``backward()`` says
what happened, instead of torch's "element 0 of tensors does not require grad".
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.torch_private import DisableTorchFunctionSubclass

DONE = "the step has already run its backward and its optimizer, and its loss has no graph: remove loss.backward(), and what follows it in the loop of a single device"
PLAIN: tuple[Callable[..., Any], ...] = (torch.Tensor.detach, torch.detach, torch.Tensor.as_subclass)  # what gives a tensor of torch's own


class StepLoss(torch.Tensor):
    """What a step returns; numbers that are computed from it are such too, and all else is a tensor of torch's own."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.autograd.grad:
            raise RuntimeError(DONE.replace("loss.backward()", "torch.autograd.grad(loss, …)"))
        with DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            is_number = type(found) is torch.Tensor and not found.dim() and found.is_floating_point() and not found.requires_grad
            return found.as_subclass(cls) if is_number and func not in PLAIN and all(found is not one for one in args) else found

    def backward(self, *args: Any, **kwargs: Any) -> None:
        if not self.requires_grad:
            raise RuntimeError(DONE)
        super().backward(*args, **kwargs)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return repr(self.detach())

    def __format__(self, form: str) -> str:
        return format(self.detach(), form)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.detach(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


def as_loss(tensor: torch.Tensor) -> StepLoss:
    return tensor.as_subclass(StepLoss)
