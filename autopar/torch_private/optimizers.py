"""Run torch's kernels of optimizers, and read how optimizers step."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from autopar.torch_private.schemas import aten

# tried on 2.11 to 2.15, on CPU: the step of many parameters in one kernel. It reads the tensors of a parameter in
# memory order, one element after the other, whatever their strides are; it divides the gradients in place; it reads lr
# as a float32 on CUDA
FUSED_ADAM = aten._fused_adam_.tensor_lr


FUSED_ADAMW = aten._fused_adamw_.tensor_lr


FUSED_SGD = aten._fused_sgd_.tensor_lr


FUSED_ADAGRAD = aten._fused_adagrad_.tensor_lr


add_to_each = torch._foreach_add_  # tried on 2.11 to 2.15: adds a tensor without dims to each of a list in place


copy_each = torch._foreach_copy_  # tried on 2.11 to 2.15: copies to each of a list the tensor of another list


interpolate_each = (
    torch._foreach_lerp_
)  # tried on 2.11 to 2.15: moves each of a list in place towards that of another by a share


def steps_as(kind: type[torch.optim.Optimizer], base: type[torch.optim.Optimizer]) -> bool:
    """Return whether a class of optimizers has the step and the state of a base. Tried on 2.11 to 2.15."""
    return all(
        inspect.unwrap(getattr(kind, name, base)) is inspect.unwrap(getattr(base, name, base))
        for name in ("step", "_init_group")
    )


def note_a_step(optimizer: torch.optim.Optimizer) -> None:
    """Mark that an optimizer has stepped: schedulers warn if they step before it. Tried on 2.11 to 2.15."""
    marked: Any = optimizer
    marked._opt_called = True


_OWN_HOOKS = weakref.WeakSet[Any]()


def call_before_steps(optimizer: torch.optim.Optimizer, call: Callable[[], None]) -> None:
    """Call a function before each step of an optimizer. It is no hook of the user, for ``has_step_hooks``."""

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        call()

    _OWN_HOOKS.add(hook)
    optimizer.register_step_pre_hook(hook)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks of the user run before or after each step of an optimizer. Tried on 2.11 to 2.15."""
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    return any(hook not in _OWN_HOOKS for hook in hooks)
