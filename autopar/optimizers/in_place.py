"""Update whole lists of parameters in place by torch's fused kernels, as the ops of ``ops`` do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.optimizers.average import AVERAGED, average
from autopar.optimizers.ops import SIGNATURES, UPDATES, on_host, unscaled
from autopar.torch_private import FUSED_ADAGRAD, FUSED_ADAM, FUSED_ADAMW, FUSED_SGD, OpOverload, add_to_each, has_kernel

Tensors = Sequence[torch.Tensor]

DESCENT = {"dampening": 0.0, "is_first_step": False}  # a buffer of zeros gives the same first step

# op → the kernel, its operands after parameters and gradients, and the arguments that the op does not have. Dampening
# has no kernel: a kernel takes the first step of all its parameters, or of none
FUSED: dict[str, tuple[OpOverload, Callable[..., tuple[Any, ...]], dict[str, Any]]] = {
    "adam": (FUSED_ADAM, lambda mean, square, step: (mean, square, [], step), {"amsgrad": False}),
    "adam.amsgrad": (FUSED_ADAM, lambda *states: states, {"amsgrad": True}),
    "adamw": (FUSED_ADAMW, lambda mean, square, step: (mean, square, [], step), {"amsgrad": False}),
    "adamw.amsgrad": (FUSED_ADAMW, lambda *states: states, {"amsgrad": True}),
    "sgd": (FUSED_SGD, lambda: ([],), {"momentum": 0.0, "nesterov": False, **DESCENT}),
    "sgd.momentum": (FUSED_SGD, lambda buffer: (buffer,), DESCENT),
    "adagrad": (FUSED_ADAGRAD, lambda total, step: (total, step), {}),
}
# in torch 2.13, these kernels on CPU leave most elements in half precision unchanged
UNWRITTEN = ("sgd", "sgd.momentum")


def count(steps: Tensors, found_inf: torch.Tensor | None) -> None:
    """Apply ``autopar::counted`` to each, in place. No two of them may share memory."""
    if steps:
        one = torch.ones((), device=steps[0].device)
        add_to_each(list(steps), one if found_inf is None else one - found_inf)


def _in_place(name: str) -> Callable[..., None]:
    sharded = len(SIGNATURES[name][0].split())

    @torch.no_grad()
    def update(params: Tensors, grads: Tensors, states: Sequence[Tensors], lr: torch.Tensor,
               grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None, **options: Any) -> None:  # fmt: skip
        if not params:
            return
        if not _has_kernel(name, params, grads):
            _one_by_one(UPDATES[name], params, grads, states, lr, grad_scale, found_inf, options)
            return
        kernel, arranged, defaults = FUSED[name]
        # kernels take a float32 only
        if grad_scale is not None and grad_scale.dtype == params[0].dtype == torch.float64:
            grads, grad_scale = [unscaled(grad, grad_scale.dtype, grad_scale) for grad in grads], None
        grads = [grad.to(param.dtype).contiguous() for grad, param in zip(grads, params, strict=True)]
        written = [params, *states[:sharded]]
        dense = [[tensor.contiguous() for tensor in tensors] for tensors in written]
        steps = [[step.float() for step in tensors] for tensors in states[sharded:]]
        kernel(dense[0], grads, *arranged(*dense[1:], *steps), lr=lr if lr.is_cpu else lr.float(),
               grad_scale=_float32(grad_scale), found_inf=_float32(found_inf), **defaults,
               **on_host(options))  # fmt: skip
        for tensors, copies in zip(written, dense, strict=True):
            for tensor, copy in zip(tensors, copies, strict=True):
                if copy is not tensor:
                    tensor.copy_(copy)

    return update


def _float32(number: torch.Tensor | None) -> torch.Tensor | None:
    return None if number is None else number.float()


def _has_kernel(name: str, params: Tensors, grads: Tensors) -> bool:
    """Return whether a kernel applies.

    Kernels take gradients in the parameter's dtype; scaled gradients may overflow in half precision.
    """
    dtype = params[0].dtype
    rounded = dtype in (torch.float16, torch.bfloat16) and any(grad.dtype != dtype for grad in grads)
    lossy = rounded or (name in UNWRITTEN and dtype in (torch.float16, torch.bfloat16) and params[0].is_cpu)
    return name in FUSED and has_kernel(FUSED[name][0], params[0].device.type) and not lossy


def _one_by_one(op: OpOverload, params: Tensors, grads: Tensors, states: Sequence[Tensors], lr: torch.Tensor,
                grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None,
                options: dict[str, Any]) -> None:  # fmt: skip
    for param, grad, *state in zip(params, grads, *states, strict=True):
        results = op(param, grad, *state, lr, grad_scale, found_inf, **options)
        for tensor, new in zip((param, *state), results if isinstance(results, tuple) else (results,), strict=False):
            tensor.copy_(new)


# : op → a function of (params, grads, states, lr, grad_scale, found_inf, **options) that overwrites parameters and
# states with : the op's results. ``states`` has a list for each of the op's states, in its order; steps are counted
# already. : All parameters have one dtype and device. Gradients may be overwritten: kernels divide them in place. :
# ``averaged`` is here too, as a function of (averages, params, states, count, found_inf, decay=…).
IN_PLACE: dict[OpOverload, Callable[..., None]] = {
    **{op: _in_place(name) for name, op in UPDATES.items()},
    AVERAGED: average,
}
#: op → how many of its last operands all parameters of a call share: lr, grad_scale, found_inf.
SHARED: dict[OpOverload, int] = {**dict.fromkeys(UPDATES.values(), 3), AVERAGED: 2}
