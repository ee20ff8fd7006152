"""Find the definition of an optimizer: the known one of its class, or one made by trials of its own step."""

from __future__ import annotations

import torch

from autopar.errors import class_of, shown
from autopar.optimizers.definition import DEFINITIONS, Definition, Group
from autopar.optimizers.own_facts import Unfit
from autopar.optimizers.own_ops import own_definition
from autopar.torch_private import has_step_hooks, steps_as

LOOP = (
    "train it in the plain loop, on the model that parallelize returns: loss = parallel(…), loss.backward(), "
    "optimizer.step("
)
REFUSED: dict[type[torch.optim.Optimizer], str] = {  # classes of torch whose step cannot be part of a graph
    torch.optim.LBFGS: f"it calls the model several times in a step, through a closure; {LOOP}closure)",
    torch.optim.SparseAdam: f"it takes sparse gradients, and those of a step are dense; {LOOP})",
}


def definition_of(optimizer: torch.optim.Optimizer) -> Definition:
    """Return the definition of an optimizer's class, or of the class whose step it inherits.

    Without one, make it by trials of the class's own step.

    Raises:
        TypeError: it is no optimizer, or its step cannot be part of a graph; the error names the remedy.
        ValueError: it has an option, a hook or a parameter that a step in the graph does not support.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{shown(optimizer)} is {class_of(optimizer)} and no torch.optim.Optimizer; make one from "
            f"parallel.parameters()"
        )
    kind = type(optimizer)
    known = _known_base(kind)
    if known in REFUSED:
        raise TypeError(f"{kind.__name__} cannot be part of a step's graph: {REFUSED[known]}")
    if has_step_hooks(optimizer):
        raise ValueError(
            f"{kind.__name__} has step hooks, but a step in the graph does not call them: remove them, and call them "
            f"around the step"
        )
    for number, group in enumerate(optimizer.param_groups):
        _check_group(f"group {number} of {kind.__name__}", group)
    if known is None or not steps_as(kind, known):
        return _by_trials(optimizer)
    for group in optimizer.param_groups:
        DEFINITIONS[known].update(group)
    return DEFINITIONS[known]


def is_known(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether a class steps as one that autopar knows. Outside of a graph it can step DTensors."""
    known = _known_base(kind)
    return known is not None and steps_as(kind, known)


def _known_base(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer] | None:
    return next((base for base in kind.__mro__ if base in DEFINITIONS or base in REFUSED), None)


def _by_trials(optimizer: torch.optim.Optimizer) -> Definition:
    try:
        return own_definition(optimizer)
    except Unfit as error:
        kind = type(optimizer).__name__
        raise TypeError(
            f"{kind} cannot be part of a step's graph: {error}; {LOOP}), or define its update with "
            f"autopar.optimizers.register_optimizer({kind}, state=…, update=…)"
        ) from error


def _check_group(label: str, group: Group) -> None:
    if group.get("differentiable"):
        raise ValueError(
            f"{label} has differentiable=True: gradients do not flow through a step in the graph; leave it out"
        )
    names = group.get("param_names") or range(len(group["params"]))
    for name, param in zip(names, group["params"], strict=True):
        if param.layout != torch.strided or not param.is_floating_point():
            kind = "sparse" if param.layout != torch.strided else str(param.dtype).removeprefix("torch.")
            raise ValueError(
                f"parameter {name} in {label} is {kind}; parameters of a step in the graph are dense and of a "
                f"floating dtype: step it outside"
            )
