"""Define Lion as an optimizer of torch and as an update for autopar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

State = Mapping[str, torch.Tensor]


class ByHand(Optimizer):
    """An optimizer as one is written: a loop over parameters, in place."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.step_of(param, param.grad, self.state[param], group)

    def step_of(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(ByHand):
    """Chen et al., NeurIPS 2023."""

    def step_of(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        mean = state.setdefault("exp_avg", torch.zeros_like(param))
        beta1, beta2 = group["betas"]
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(mean.mul(beta1).add(grad, alpha=1 - beta1).sign_(), alpha=-group["lr"])
        mean.mul_(beta2).add_(grad, alpha=1 - beta2)


def lion(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: State,
    lr: torch.Tensor,
    *,
    betas: tuple[float, float],
    weight_decay: float,
) -> Any:
    mean = state["exp_avg"]
    direction = (betas[0] * mean + (1 - betas[0]) * grad).sign()
    return param * (1 - lr * weight_decay) - lr * direction, {"exp_avg": mean.lerp(grad, 1 - betas[1])}
