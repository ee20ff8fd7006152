"""Run the step of an optimizer's class on tensors that are not its own.

They are pieces of parameters, with their gradients and state. The class runs unchanged: a stand-in has the optimizer's
attributes, one parameter group with the pieces, and their state. So the step is the user's own, or torch's, with its
own kernels; the optimizer itself is not changed.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

Group = Mapping[str, Any]

# entries of groups that only schedulers use
SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class FirstValues(dict[str, Any]):
    """The state of one parameter. It keeps a copy of the first value of each entry, before anything is written to it.

    Attributes:
        first: name → a copy of that value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        if value is not None and name not in self.first:
            self.first[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value


class OwnStep:
    """The step of an optimizer, for groups with these options.

    Attributes:
        optimizer: the optimizer whose class and attributes are used.
        constants: the options that are not numbers, or whole numbers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, constants: Mapping[str, Any]) -> None:
        self.optimizer, self.constants = optimizer, dict(constants)

    @torch.no_grad()
    def __call__(self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], states: Sequence[dict[str, Any]],
                 numbers: Mapping[str, float]) -> torch.optim.Optimizer:  # fmt: skip
        """Overwrite the parameters, and put the new states into ``states``. Returns the stand-in.

        The new states may be in the memory of the old ones or not.
        """
        pieces = [param.detach() for param in params]
        for piece, grad in zip(pieces, grads, strict=True):
            piece.grad = grad
        group = {**self.constants, **regrouped(numbers), "params": pieces}
        stand_in = stand_in_of(self.optimizer, [group], dict(zip(pieces, states, strict=True)))
        type(self.optimizer).step(stand_in)  # a step that needs a closure is refused
        for param, piece in zip(params, pieces, strict=True):
            if piece.data_ptr() != param.data_ptr():  # the step assigned new memory, as by ``p.data = …``
                param.copy_(piece)
        return stand_in


def stand_in_of(
    optimizer: torch.optim.Optimizer, groups: Sequence[Group], states: Mapping[Any, Any]
) -> torch.optim.Optimizer:
    """Return an optimizer with the attributes of another, these groups and states, and no hooks."""
    stand_in = object.__new__(type(optimizer))
    vars(stand_in).update(vars(optimizer))
    stand_in.param_groups, stand_in.state = [dict(group) for group in groups], defaultdict(dict, states)
    vars(stand_in).update({hooks: OrderedDict() for hooks in HOOKS})
    return stand_in


def options_of(group: Group, defaults: Iterable[str]) -> tuple[dict[str, Any], dict[str, float]]:
    """Split a group's options into constants and numbers that may change from step to step.

    ``betas.0`` is the first of a tuple.
    """
    constants: dict[str, Any] = {}
    numbers: dict[str, float] = {}
    names = set(defaults)
    for name, value in group.items():
        if name in ("params", "param_names") or (name in SCHEDULERS and name not in names):
            continue
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            value = value.item()
        if isinstance(value, (tuple, list)) and value and all(isinstance(number, float) for number in value):
            numbers |= {f"{name}.{k}": number for k, number in enumerate(value)}
        elif isinstance(value, float) or name == "lr":
            numbers[name] = float(value)
        else:
            constants[name] = value
    return constants, numbers


def regrouped(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuild the tuples that ``options_of`` has split."""
    options: dict[str, Any] = {}
    for key, value in numbers.items():
        name, _, part = key.rpartition(".")
        if name and part.isdecimal():
            options[name] = (*options.get(name, ()), value)
        else:
            options[key] = value
    return options
