"""Define the updates of torch's optimizers as ops: functions of a parameter, its gradient and its state.

They write nothing.

    new_step                        = counted(step, found_inf)
    new_param, new_avg, new_avg_sq  = adamw(param, grad, exp_avg, exp_avg_sq, new_step, lr, grad_scale, found_inf,
                                            beta1=beta1, …, eps=1e-8)

Each is torch's own formula, operation by operation in its order (``torch.optim``, one tensor after the other). Half
precision is computed in float32 and rounded once, as in the fused kernels. ``step`` is counted already. The numbers
that change from step to step are tensors without dims:

    lr          the learning rate; float64, so that 1e-3 is as exact as in Python
    grad_scale  the divisor of gradients: averaging, unscaling and clipping in one number
    found_inf   1 if the step is skipped and nothing changes, else 0
    SCHEDULED   the numbers that schedulers change too (``OneCycleLR`` cycles beta1 or momentum); float64. Kernels take
                Python numbers, so these tensors are on the CPU, where reading them does not wait for an accelerator
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar.ir.ops.sharded_lookup import LIBRARY
from autopar.torch_private import OpOverload

Tensor = torch.Tensor

MOMENTS = "beta1 beta2 weight_decay eps maximize"

SIGNATURES: dict[str, tuple[str, str, str]] = {  # op → states sharded like the parameter; states without dims; options
    "adam": ("exp_avg exp_avg_sq", "step", MOMENTS),
    "adam.amsgrad": ("exp_avg exp_avg_sq max_exp_avg_sq", "step", MOMENTS),
    "adamw": ("exp_avg exp_avg_sq", "step", MOMENTS),
    "adamw.amsgrad": ("exp_avg exp_avg_sq max_exp_avg_sq", "step", MOMENTS),
    "sgd": ("", "", "weight_decay maximize"),
    "sgd.momentum": ("momentum_buffer", "", "momentum weight_decay nesterov maximize"),
    "sgd.dampened": ("momentum_buffer", "step", "momentum dampening weight_decay nesterov maximize"),
    "adagrad": ("sum", "step", "lr_decay weight_decay eps maximize"),
}
TRUTHS = ("nesterov", "maximize")
SCHEDULED = ("beta1", "beta2", "momentum", "weight_decay")

UPDATES: dict[str, OpOverload] = {}


def states_of(name: str) -> tuple[str, ...]:
    """Return the states that an op reads, in its order."""
    sharded, without_dims, _ = SIGNATURES[name]
    return (*sharded.split(), *without_dims.split())


def make_op(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> OpOverload:
    """Register a function of tensors as ``torch.ops.autopar.…``."""
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar::{name}", fake, lib=LIBRARY)
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.autopar, packet), overload or "default")


def _update(name: str) -> Callable[[Callable[..., tuple[Tensor, ...]]], Callable[..., tuple[Tensor, ...]]]:
    """Register a formula as an op.

    The op divides the gradient by its scale, and keeps the old values of a skipped step.
    """
    results = 1 + len(SIGNATURES[name][0].split())

    def register(formula: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        def update(param: Tensor, grad: Tensor, *operands: Any, maximize: bool, **options: Any) -> Any:
            *states, lr, grad_scale, found_inf = operands
            wide, *others = (widened(x) for x in (param, *states[: results - 1]))
            grad = unscaled(grad, wide.dtype, grad_scale)
            new = formula(
                wide, -grad if maximize else grad, *others, *states[results - 1 :], lr=lr.double(), **on_host(options)
            )
            results_of_param = tuple(
                unless(found_inf, x.to(old.dtype), old) for x, old in zip(new, (param, *states), strict=False)
            )
            return results_of_param if len(results_of_param) > 1 else results_of_param[0]

        def fake(param: Tensor, grad: Tensor, *operands: Any, **_: Any) -> Any:
            results_like = tuple(torch.empty_like(x) for x in (param, *operands[: results - 1]))
            return results_like if len(results_like) > 1 else results_like[0]

        UPDATES[name] = make_op(name, _schema(name), update, fake)
        return formula

    return register


def _schema(name: str) -> str:
    """Return the schema of an update.

    ``(Tensor param, Tensor grad, …, Tensor lr, Tensor? grad_scale, Tensor? found_inf, *, Tensor beta1, …, float eps, …)
    -> (Tensor, …)``
    """
    sharded, _, options = SIGNATURES[name]
    operands = [f"Tensor {operand}" for operand in ("param", "grad", *states_of(name), "lr")]
    numbers = [
        f"{'Tensor' if option in SCHEDULED else 'bool' if option in TRUTHS else 'float'} {option}"
        for option in options.split()
    ]
    results = ", ".join(["Tensor"] * (1 + len(sharded.split())))
    return f"({', '.join([*operands, 'Tensor? grad_scale', 'Tensor? found_inf', '*', *numbers])}) -> ({results})"


def scheduled_of(name: str) -> tuple[str, ...]:
    """Return the options of an op that are tensors, in its order."""
    return tuple(option for option in SIGNATURES[name][2].split() if option in SCHEDULED)


def on_host(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace tensors among the options by their numbers."""
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in options.items()}


def widened(x: Tensor) -> Tensor:
    """Convert a tensor of half precision to float32; others are unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x


def unscaled(grad: Tensor, dtype: torch.dtype, grad_scale: Tensor | None) -> Tensor:
    """Divide a gradient in this dtype: scaled it may be too large for half precision, and unscaled too small."""
    return grad.to(dtype) if grad_scale is None else grad.to(dtype) / grad_scale.to(dtype)


def unless(found_inf: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """Return the new value of a state, or the old one if the step is skipped."""
    return new if found_inf is None else torch.where(found_inf == 0, new, old)


COUNTED = make_op(
    "counted", "(Tensor step, Tensor? found_inf) -> Tensor",
    lambda step, found_inf: unless(found_inf, step + 1, step),
    lambda step, found_inf: torch.empty_like(step),
)  # fmt: skip


def decayed(grad: Tensor, param: Tensor, weight_decay: float) -> Tensor:
    """Add the gradient of ``weight_decay / 2 * param ** 2``. Without decay an infinite parameter adds no NaN."""
    return grad.add(param, alpha=weight_decay) if weight_decay else grad


# -- Adam (Kingma, Ba 2015), AdamW (Loshchilov, Hutter 2019), AMSGrad (Reddi, Kale, Kumar 2018)
# ----------------------------


def _moments(grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
    """Return the running means of the gradient and of its square."""
    return exp_avg.lerp(grad, 1 - beta1), (exp_avg_sq * beta2).addcmul(grad, grad, value=1 - beta2)


def _along(
    param: Tensor, exp_avg: Tensor, second: Tensor, step: Tensor, lr: Tensor, beta1: float, beta2: float, eps: float
) -> Tensor:
    """Move the parameter along the mean gradient; both means are corrected for their start at zero."""
    size, root = lr / (1 - beta1 ** step.double()), (1 - beta2 ** step.double()).sqrt()
    return param + -size.to(param.dtype) * exp_avg / (second.sqrt() / root.to(param.dtype) + eps)


@_update("adam")
def adam(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, *, lr: Tensor, beta1: float,
         beta2: float, weight_decay: float, eps: float) -> tuple[Tensor, ...]:  # fmt: skip
    exp_avg, exp_avg_sq = _moments(decayed(grad, param, weight_decay), exp_avg, exp_avg_sq, beta1, beta2)
    return _along(param, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps), exp_avg, exp_avg_sq


@_update("adam.amsgrad")
def adam_amsgrad(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, max_exp_avg_sq: Tensor, step: Tensor,
                 *, lr: Tensor, beta1: float, beta2: float, weight_decay: float,
                 eps: float) -> tuple[Tensor, ...]:  # fmt: skip
    exp_avg, exp_avg_sq = _moments(decayed(grad, param, weight_decay), exp_avg, exp_avg_sq, beta1, beta2)
    largest = torch.maximum(max_exp_avg_sq, exp_avg_sq)
    return _along(param, exp_avg, largest, step, lr, beta1, beta2, eps), exp_avg, exp_avg_sq, largest


@_update("adamw")
def adamw(
    param: Tensor, grad: Tensor, *states: Tensor, lr: Tensor, weight_decay: float, **options: float
) -> tuple[Tensor, ...]:
    return adam(param * (1 - lr * weight_decay).to(param.dtype), grad, *states, lr=lr, weight_decay=0.0, **options)


@_update("adamw.amsgrad")
def adamw_amsgrad(
    param: Tensor, grad: Tensor, *states: Tensor, lr: Tensor, weight_decay: float, **options: float
) -> tuple[Tensor, ...]:
    return adam_amsgrad(
        param * (1 - lr * weight_decay).to(param.dtype), grad, *states, lr=lr, weight_decay=0.0, **options
    )


# -- gradient descent, with momentum (Polyak 1964; Nesterov, as in Sutskever et al. 2013) ------------------------------


@_update("sgd")
def sgd(param: Tensor, grad: Tensor, *, lr: Tensor, weight_decay: float) -> tuple[Tensor, ...]:
    return (_descended(param, decayed(grad, param, weight_decay), lr),)


@_update("sgd.momentum")
def sgd_momentum(param: Tensor, grad: Tensor, momentum_buffer: Tensor, *, lr: Tensor, momentum: float,
                 weight_decay: float, nesterov: bool) -> tuple[Tensor, ...]:  # fmt: skip
    """Step with momentum. A buffer of zeros acts like torch's missing buffer.

    After the first step it is the first gradient.
    """
    grad = decayed(grad, param, weight_decay)
    buffer = momentum_buffer * momentum + grad
    return _descended(param, grad.add(buffer, alpha=momentum) if nesterov else buffer, lr), buffer


@_update("sgd.dampened")
def sgd_dampened(param: Tensor, grad: Tensor, momentum_buffer: Tensor, step: Tensor, *, lr: Tensor, momentum: float,
                 dampening: float, weight_decay: float, nesterov: bool) -> tuple[Tensor, ...]:  # fmt: skip
    """Step with dampened momentum.

    The first gradient is not dampened, so this op needs a step count, which torch does not keep.
    """
    grad = decayed(grad, param, weight_decay)
    share = 1 - dampening * (step != 1).double()
    buffer = momentum_buffer * momentum + share.to(param.dtype) * grad
    return _descended(param, grad.add(buffer, alpha=momentum) if nesterov else buffer, lr), buffer


def _descended(param: Tensor, direction: Tensor, lr: Tensor) -> Tensor:
    return param + direction * -lr.to(param.dtype)


# -- Adagrad (Duchi, Hazan, Singer 2011) -------------------------------------------------------------------------------


@_update("adagrad")
def adagrad(param: Tensor, grad: Tensor, total: Tensor, step: Tensor, *, lr: Tensor, lr_decay: float,
            weight_decay: float, eps: float) -> tuple[Tensor, ...]:  # fmt: skip
    grad = decayed(grad, param, weight_decay)
    total = total.addcmul(grad, grad, value=1)
    size = lr / (1 + (step.double() - 1) * lr_decay)
    return param + -size.to(param.dtype) * grad / (total.sqrt() + eps), total
