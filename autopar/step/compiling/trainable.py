"""Refuse parameters that a step would not train as eager does: replaced ones, and those whose gradients have hooks."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch

from autopar.capture.model_state import ModelState
from autopar.torch_private import have_gradient_hooks


def refuse_untrainable(model: ModelState, groups: Mapping[str, tuple[int, torch.nn.Parameter]]) -> None:
    """Refuse parameters of the optimizer that a step would not train as eager does.

    It runs at each step, and takes a few microseconds if there is nothing to refuse.

    Args:
        model: the parameters of the model now.
        groups: the optimizer's parameters by name, each with the number of its group.

    Raises:
        ValueError: a parameter was replaced in the model, or has a gradient hook.
    """
    now, parameters = dict(model.all_parameters), [parameter for _, parameter in groups.values()]
    if all(map(operator.is_, map(now.get, groups), parameters)) and not have_gradient_hooks(parameters):
        return
    for name, (number, parameter) in groups.items():
        if now.get(name) is not parameter:
            reason = "another parameter is there" if name in now else "it is no parameter of the model any more"
            raise ValueError(
                f"{name} was replaced after the optimizer was made, which still has the one before (in group "
                f"{number}): {reason}; make the optimizer of parallel.parameters() again, and the step of it"
            )
        if have_gradient_hooks([parameter]):
            raise ValueError(
                f"{name} has a hook of its gradient, which is not called where the gradient is part of a graph: "
                f"remove it, or train in the plain loop, on the model that parallelize returns: loss = parallel(…), "
                f"loss.backward(), optimizer.step()"
            )
