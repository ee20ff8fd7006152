"""Define what autopar knows of an optimizer's class: how it updates a parameter, and its initial state."""

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
        name: the name of the class.
        update: the step of a group's parameters.
        shared: states without dims, which are the same on every rank; the others are sharded like the parameter.
        begin: the states that do not begin as zeros, from a parameter, its group, and the known entries of its state.
        at_once: whether a parameter's states are all made at its first step, so that a state that is not empty has them
            all.
        optional: states that may be missing although others exist.
    """

    name: str
    update: Callable[[Group], Update]
    shared: frozenset[str] = frozenset()
    begin: Callable[[torch.Tensor, Group, Mapping[str, Any]], State] = lambda param, group, known: {}
    at_once: bool = False
    optional: frozenset[str] = frozenset()

    def lacking(self, group: Group, known: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the states that are missing in a parameter's known state.

        A state without any of them is new, and lacks nothing.
        """
        states = self.update(group).states
        missing = tuple(name for name in states if known.get(name) is None)
        if len(missing) == len(states) and not (self.at_once and known):
            return ()
        return tuple(name for name in missing if name not in self.optional)

    def initial(self, param: torch.Tensor, group: Group, known: Mapping[str, Any] | None = None) -> State:
        """Return the state of a parameter, or of a piece of it.

        It has the known entries, as in ``optimizer.state[param]``, and else torch's initial values. States sharded like
        the parameter have its dtype, and those without dims are float32.
        """
        known = {
            name: value.to(param.device) for name, value in (known or {}).items() if isinstance(value, torch.Tensor)
        }
        values = {**self.begin(param, group, known), **known}
        return {
            name: values[name] if name in values else self._zeros(name, param) for name in self.update(group).states
        }

    def _zeros(self, name: str, param: torch.Tensor) -> torch.Tensor:
        return (
            torch.zeros((), dtype=torch.float32, device=param.device)
            if name in self.shared
            else torch.zeros_like(param)
        )


DEFINITIONS: dict[type[torch.optim.Optimizer], Definition] = {}


def constant(kind: str, name: str, value: Any) -> Any:
    """Return a number of a group. It becomes part of the program, so it cannot be a tensor."""
    if any(isinstance(item, torch.Tensor) for item in (value if isinstance(value, (tuple, list)) else (value,))):
        raise ValueError(f"{name} of {kind} is a tensor, but the graph would keep its value; give a number")
    return value


def words(names: str | Iterable[str]) -> tuple[str, ...]:
    return tuple(names.split() if isinstance(names, str) else names)
