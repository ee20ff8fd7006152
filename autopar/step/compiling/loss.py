"""Explain, where a user calls ``backward()`` on the loss of a step, that the step has run its backward already.

The loss is a plain number without an autograd graph, and so are sums and means that are computed from it. Only
``backward()`` differs: its error says what to remove from the loop, instead of torch's "element 0 of tensors does not
require grad".
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.torch_private import DisableTorchFunctionSubclass

DONE = (
    "the step has already run its backward and its optimizer, and its loss has no graph: remove loss.backward(), "
    "and what follows it in the loop of a single device"
)
# functions that return a plain torch tensor
PLAIN: tuple[Callable[..., torch.Tensor], ...] = (torch.Tensor.detach, torch.detach, torch.Tensor.as_subclass)


class StepLoss(torch.Tensor):
    """The loss that a step returns.

    Numbers that are computed from it are of this class, too; other results are plain tensors.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., torch.Tensor],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.autograd.grad:
            raise RuntimeError(DONE.replace("loss.backward()", "torch.autograd.grad(loss, …)"))
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            is_number = (
                type(result) is torch.Tensor
                and not result.dim()
                and result.is_floating_point()
                and not result.requires_grad
            )
            return (
                result.as_subclass(cls)
                if is_number and func not in PLAIN and all(result is not arg for arg in args)
                else result
            )

    def backward(self, *args: object, **kwargs: object) -> None:
        if not self.requires_grad:
            raise RuntimeError(DONE)
        super().backward(*args, **kwargs)

    def __repr__(self, **kwargs: object) -> str:  # type: ignore[override]
        return repr(self.detach())

    def __format__(self, form: str) -> str:
        return format(self.detach(), form)

    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        return copy.deepcopy(self.detach(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


def as_loss(tensor: torch.Tensor) -> StepLoss:
    """Return the same tensor as a ``StepLoss``."""
    return tensor.as_subclass(StepLoss)
