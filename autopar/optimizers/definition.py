"""What is known of an optimizer's class: how a parameter is updated, and with what state it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.optimizers.update import Update

Group = Mapping[str, Any]
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Definition:
    """One class of optimizers, as functions of a group of ``optimizer.param_groups``.

    Attributes:
        name: of the class.
        update: the step of a group's parameters.
        shared: states without dims, the same on every rank; the others lie as the parameter does.
        begin: the states that do not begin as zeros, of a parameter, its group, and what is known of its state.
        at_once: whether a parameter's states are all made at its first step, so that a state that is not empty has them all.
        optional: states that may be missing where the others are there.
    """

    name: str
    update: Callable[[Group], Update]
    shared: frozenset[str] = frozenset()
    begin: Callable[[torch.Tensor, Group, Mapping[str, Any]], State] = lambda param, group, known: {}
    at_once: bool = False
    optional: frozenset[str] = frozenset()

    def lacking(self, group: Group, known: Mapping[str, Any]) -> tuple[str, ...]:
        """The states that are missing in what is known of a parameter. What has none of them begins anew, and lacks nothing."""
        states = self.update(group).states
        missing = tuple(name for name in states if known.get(name) is None)
        if len(missing) == len(states) and not (self.at_once and known):
            return ()
        return tuple(name for name in missing if name not in self.optional)

    def initial(self, param: torch.Tensor, group: Group, known: Mapping[str, Any] | None = None) -> State:
        """The state of a parameter, or of a piece of it: what is known, as ``optimizer.state[param]`` has it, and else what torch
        begins with. States that lie as the parameter does have its dtype, and those without dims are float32."""
        known = {name: value.to(param.device) for name, value in (known or {}).items() if isinstance(value, torch.Tensor)}
        begun = {**self.begin(param, group, known), **known}
        return {name: begun[name] if name in begun else self._zeros(name, param) for name in self.update(group).states}

    def _zeros(self, name: str, param: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float32, device=param.device) if name in self.shared else torch.zeros_like(param)


DEFINITIONS: dict[type[torch.optim.Optimizer], Definition] = {}


def constant(what: str, name: str, value: Any) -> Any:
    """A number of a group; it is part of the program, so it cannot be a tensor."""
    if any(isinstance(one, torch.Tensor) for one in (value if isinstance(value, (tuple, list)) else (value,))):
        raise ValueError(f"{name} of {what} is a tensor, whose value a graph would keep; give a number")
    return value


def words(names: str | Iterable[str]) -> tuple[str, ...]:
    return tuple(names.split() if isinstance(names, str) else names)
