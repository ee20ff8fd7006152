"""Refuse parameters that a step would not train as eager does: replaced ones, and those whose gradients have hooks."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch

from autopar.capture.model_state import ModelState
from autopar.torch_private import have_gradient_hooks


def refuse_untrainable(own: ModelState, groups: Mapping[str, tuple[int, torch.nn.Parameter]]) -> None:
    """Look at each parameter of the optimizer, at each step: in a few microseconds where there is nothing to refuse.

    Args:
        groups: the optimizer's parameters by name, each with the number of its group.

    Raises:
        ValueError: the model has another parameter of that name now, or something is called with the gradient of one.
    """
    now, parameters = dict(own.all_parameters), [parameter for _, parameter in groups.values()]
    if all(map(operator.is_, map(now.get, groups), parameters)) and not have_gradient_hooks(parameters):
        return
    for name, (number, parameter) in groups.items():
        if now.get(name) is not parameter:
            there = "another parameter is there" if name in now else "it is no parameter of the model any more"
            raise ValueError(
                f"{name} was replaced after the optimizer was made, which still has the one before (in group {number}): {there}; "
                f"make the optimizer of parallel.parameters() again, and the step of it"
            )
        if have_gradient_hooks([parameter]):
            raise ValueError(
                f"{name} has a hook of its gradient, which is not called where the gradient is part of a graph: remove it, "
                f"or train in the plain loop, on the model that parallelize returns: loss = parallel(…), loss.backward(), optimizer.step()"
            )
