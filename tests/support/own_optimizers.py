"""Optimizers as people write them, of which autopar is told nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class ByHand(Optimizer):
    """A loop over parameters, in place."""

    def __init__(self, params: Any, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.step_of(p, p.grad, self.state[p], group)

    def step_of(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(ByHand):
    """Chen et al. 2023; its steps are smooth, so that a rounding is one, and get shorter: a count, kept as a Python
    int."""

    def step_of(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if len(state) == 0:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_((state["exp_avg"] * beta1 + grad * (1 - beta1)).tanh(), alpha=-group["lr"] / state["step"] ** 0.5)
        state["exp_avg"].mul_(beta2).add_(grad, alpha=1 - beta2)


class Replacing(ByHand):
    """It gives parameters and states new memory."""

    def step_of(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "mean" not in state:
            state.update(mean=torch.zeros_like(p), decay=torch.ones(()))
        state["mean"] = 0.9 * state["mean"] + 0.1 * grad
        state["decay"] = state["decay"] * 0.9
        p.data = p.data - group["lr"] * state["mean"] / (1 - state["decay"])


class Lamb(ByHand):
    """You et al. 2020, in short: a parameter's step is as long as the parameter."""

    def step_of(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        mean = state.setdefault("exp_avg", torch.zeros_like(p))
        mean.mul_(0.9).add_(grad, alpha=0.1)
        p.add_(mean / mean.norm() * p.norm().clamp(min=0.1), alpha=-group["lr"])


class Counting(Lion):
    """It counts in an attribute."""

    def step(self, closure: Any = None) -> None:
        self.count = getattr(self, "count", 0) + 1
        super().step()


class CountingInGroups(Lion):
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1


class Noisy(ByHand):
    def step_of(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(group["lr"] * (grad + torch.randn_like(p)))


class Together(ByHand):
    """The norm of all gradients is in each step."""

    def step_of(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        norm = torch.stack([other.grad.norm() for other in group["params"]]).norm()
        p.sub_(group["lr"] * grad / norm)


class FromTheFirst(ByHand):
    """Its state begins with the first gradient."""

    def step_of(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["mean"] = grad.clone() if "mean" not in state else 0.9 * state["mean"] + 0.1 * grad
        p.sub_(group["lr"] * state["mean"])


class WithAClosure(ByHand):
    @torch.no_grad()
    def step(self, closure: Any) -> None:
        closure()


class Rows(ByHand):
    def step_of(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        total = state.setdefault("row", torch.zeros(p.shape[0], 1))
        total += 1
        p.sub_(group["lr"] * grad)


LOOP = (
    "; train it in the plain loop, on the model that parallelize returns: loss = parallel(…), loss.backward(), "
    "optimizer.step(), or define its update with "
)
REASONS: list[tuple[type[ByHand], dict[str, Any], str]] = [
    (
        Counting,
        {"betas": (0.9, 0.99), "weight_decay": 0.0},
        "it changes an attribute of the optimizer, count, which all parameters share",
    ),
    (
        CountingInGroups,
        {"betas": (0.9, 0.99), "weight_decay": 0.0},
        "it changes entries of its parameter groups, which all parameters share",
    ),
    (Noisy, {}, "it draws random numbers"),
    (Together, {}, "the step of a parameter depends on the other parameters"),
    (FromTheFirst, {}, "its first step does not begin with a state that is the same for all gradients"),
    (
        WithAClosure,
        {},
        "a trial of it with a parameter of shape [5] ended with TypeError: WithAClosure.step() missing 1 required "
        "positional argument: 'closure'",
    ),
    (Rows, {}, "its state row is of shape [5, 1], and neither of the parameter's shape nor a number"),
    (ByHand, {}, "a trial of it with a parameter of shape [5] ended with NotImplementedError: "),
]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


O = torch.optim  # noqa: E741
MADE: dict[str, tuple[Callable[[nn.Module], Optimizer], bool]] = {  # and whether they work element by element
    "rmsprop": (lambda m: O.RMSprop(m.parameters(), lr=1e-2), True),
    "rmsprop momentum centered": (
        lambda m: O.RMSprop(m.parameters(), lr=1e-2, momentum=0.9, centered=True, weight_decay=0.1, foreach=True),
        True,
    ),
    "nadam": (lambda m: O.NAdam(m.parameters(), lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True), True),
    "radam": (lambda m: O.RAdam(m.parameters(), lr=1e-2, weight_decay=0.1, maximize=True), True),
    "adamax": (lambda m: O.Adamax(m.parameters(), lr=1e-2), True),
    "adadelta": (lambda m: O.Adadelta(m.parameters(), lr=1.0), True),
    "asgd": (lambda m: O.ASGD(m.parameters(), lr=1e-2, t0=2, lambd=0.1), True),
    "rprop": (lambda m: O.Rprop(m.parameters(), lr=1e-2), True),
    "muon": (lambda m: O.Muon(matrices(m), lr=1e-2), False),
    "lion": (lambda m: Lion(m.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1), True),
    "replacing": (lambda m: Replacing(m.parameters()), True),
    "lamb": (lambda m: Lamb(m.parameters()), False),
}
