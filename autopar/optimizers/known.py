"""Define torch's optimizers that are one op each: the op that a group's options select, and its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar.optimizers.definition import DEFINITIONS, Definition, Group, State, constant
from autopar.optimizers.ops import SIGNATURES, TRUTHS, UPDATES, scheduled_of, states_of
from autopar.optimizers.update import Update


def _adam(group: Group) -> str:
    return ("adamw" if group["decoupled_weight_decay"] else "adam") + ".amsgrad" * bool(group["amsgrad"])


def _sgd(group: Group) -> str:
    return "sgd" if not group["momentum"] else "sgd.dampened" if group["dampening"] else "sgd.momentum"


def _adagrad(group: Group) -> str:
    return "adagrad"


def _started(param: torch.Tensor, group: Group, known: Mapping[str, Any]) -> State:
    """Return a step count of one if torch has a momentum buffer: the first step is over."""
    return {"step": torch.ones((), device=param.device, dtype=torch.float32)} if "momentum_buffer" in known else {}


def _accumulated(param: torch.Tensor, group: Group, known: Mapping[str, Any]) -> State:
    return {"sum": torch.full_like(param, group["initial_accumulator_value"])}


def _update_by(kind: str, choose: Callable[[Group], str]) -> Callable[[Group], Update]:
    def update(group: Group) -> Update:
        name = choose(group)
        _, counted, options = SIGNATURES[name]
        beta1, beta2 = group.get("betas", (None, None))
        options_by_name = {**group, "beta1": beta1, "beta2": beta2}
        numbers = {option: constant(kind, option, options_by_name[option]) for option in options.split()}
        numbers = {option: bool(value) if option in TRUTHS else float(value) for option, value in numbers.items()}
        scheduled = {option: numbers.pop(option) for option in scheduled_of(name)}
        return Update(
            UPDATES[name], states_of(name), numbers, tuple(counted.split()), elementwise=True, scheduled=scheduled
        )

    return update


_ALL: dict[str, Any] = {"at_once": True}

for _class, _choose, _given in (
    (torch.optim.Adam, _adam, _ALL),
    (torch.optim.AdamW, _adam, _ALL),
    (torch.optim.SGD, _sgd, {"begin": _started, "optional": frozenset({"step"})}),  # torch keeps no step count for SGD
    (torch.optim.Adagrad, _adagrad, _ALL | {"begin": _accumulated}),
):
    _name = _class.__name__
    DEFINITIONS[_class] = Definition(_name, _update_by(_name, _choose), frozenset({"step"}), **_given)
