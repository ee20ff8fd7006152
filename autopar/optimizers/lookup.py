"""Finds the definition of an optimizer: that of a class that is known, or one made by trials of its own step."""

from __future__ import annotations

import torch

from autopar.errors import shown
from autopar.optimizers.definition import DEFINITIONS, Definition, Group
from autopar.optimizers.own_facts import Unfit
from autopar.optimizers.own_ops import own_definition
from autopar.torch_private import has_step_hooks, steps_as

LOOP = "train it in the plain loop, on the model that parallelize returns: loss = parallel(…), loss.backward(), optimizer.step("
REFUSED: dict[type[torch.optim.Optimizer], str] = {  # classes of torch that no step in a graph can be
    torch.optim.LBFGS: f"it calls the model several times in a step, through a closure; {LOOP}closure)",
    torch.optim.SparseAdam: f"it takes sparse gradients, and those of a step are dense; {LOOP})",
}


def definition_of(optimizer: torch.optim.Optimizer) -> Definition:
    """The definition of an optimizer's class, or of the one whose step it inherits; else its own step is tried and run.

    Raises:
        TypeError: it is no optimizer, or its step cannot be part of a graph; it names the remedy.
        ValueError: an option, a hook or a parameter that a step in the graph does not have.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{shown(optimizer)} is a {type(optimizer).__name__} and no torch.optim.Optimizer; make one of parallel.parameters()")
    kind = type(optimizer)
    known = next((base for base in kind.__mro__ if base in DEFINITIONS or base in REFUSED), None)
    if known in REFUSED:
        raise TypeError(f"{kind.__name__} cannot be part of a step's graph: {REFUSED[known]}")
    if has_step_hooks(optimizer):
        raise ValueError(f"{kind.__name__} has hooks of its step, which is not called where it is part of a graph: remove them, and call them around the step")
    for number, group in enumerate(optimizer.param_groups):
        _check_group(f"group {number} of {kind.__name__}", group)
    if known is None or not steps_as(kind, known):
        return _by_trials(optimizer)
    for group in optimizer.param_groups:
        DEFINITIONS[known].update(group)
    return DEFINITIONS[known]


def _by_trials(optimizer: torch.optim.Optimizer) -> Definition:
    try:
        return own_definition(optimizer)
    except Unfit as error:
        kind = type(optimizer).__name__
        raise TypeError(
            f"{kind} cannot be part of a step's graph: {error}; {LOOP}), or say how it works with "
            f"autopar.optimizers.register_optimizer({kind}, state=…, update=…)"
        ) from error


def _check_group(what: str, group: Group) -> None:
    if group.get("differentiable"):
        raise ValueError(f"{what} has differentiable=True: gradients do not flow through a step in the graph; leave it out")
    names = group.get("param_names") or range(len(group["params"]))
    for name, param in zip(names, group["params"], strict=True):
        if param.layout != torch.strided or not param.is_floating_point():
            kind = "sparse" if param.layout != torch.strided else str(param.dtype).removeprefix("torch.")
            raise ValueError(f"parameter {name} in {what} is {kind}; parameters of a step in the graph are dense and of a floating dtype: step it outside")
