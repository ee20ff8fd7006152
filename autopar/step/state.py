"""The state of a training: what a step goes on from, by the user's names, so that another mesh or another stage of ZeRO can too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from autopar.step.fit import SAVED, check_generator, check_groups, check_model, check_scaler, number_of, parts_of

if TYPE_CHECKING:
    from autopar.step.train_step import TrainStep


def state_of(step: TrainStep) -> dict[str, Any]:
    """Parameters and buffers, the optimizer's state and groups, the averages of weights, the generator of random numbers, and how many steps were taken.

    Tensors are those of the step, and not copies; on processes DTensors, of which each rank has its pieces.
    """
    owned = step.owned
    named = {name: tensor for name, (_, tensor) in owned.groups().items()}
    state = {name: dict(step.optimizer.state[tensor]) for name, tensor in named.items() if step.optimizer.state.get(tensor)}
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": [owned.name(p) for p in group["params"]]}
        for group in step.optimizer.param_groups
    ]
    return {
        "model": dict(step.parallel.module.state_dict()),
        "optimizer": {"state": state, "param_groups": groups},
        **({} if step.averages is None else {"ema": step.averages.state_dict()}),
        **({} if step.scaler is None else {"scaler": step.options.loss_scale.state_dict(*step.scaler)}),
        "rng": _rng(step),
        "step": step.steps,
    }


def load_into(step: TrainStep, state: Mapping[str, Any]) -> None:
    """Go on from such a state: full tensors are cut, DTensors are re-laid.

    Raises:
        TypeError: a part is no mapping where it should be one; nothing has been changed.
        ValueError: a part is missing, or does not fit this step; nothing has been changed.
    """
    owned, optimizer = step.owned, step.optimizer
    named = {owned.name(tensor): tensor for group in optimizer.param_groups for tensor in group["params"]}
    _check(step, state, named)
    own = step.parallel.module.state_dict()
    if any(state["model"].get(name) is not tensor for name, tensor in own.items()):
        step.parallel.load_state_dict(state["model"])
    for group, saved in zip(optimizer.param_groups, state["optimizer"]["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    for name, tensor in named.items():
        if name in state["optimizer"]["state"]:
            optimizer.state[tensor] = dict(state["optimizer"]["state"][name])
        else:
            optimizer.state.pop(tensor, None)
    if step.scaler is not None and "scaler" in state:
        for tensor, value in zip(step.scaler, (state["scaler"]["scale"], state["scaler"]["_growth_tracker"]), strict=True):
            tensor.fill_(value)
    if step.averages is not None:
        step.averages.load_state_dict(state["ema"])
    torch.set_rng_state(state["rng"].cpu())
    step.steps = number_of("the state's 'step'", state["step"])
    owned.forget()


def _check(step: TrainStep, state: Mapping[str, Any], named: Mapping[str, torch.Tensor]) -> None:
    """Everything that is wrong with a state is an error here. ``named``: the optimizer's parameters."""
    parts_of("the state of a step", state, ("model", "optimizer", "rng", "step"))
    check_model(parts_of("the state's 'model'", state["model"]), step.parallel.module.state_dict())
    check_generator(state["rng"])
    steps = number_of("the state's 'step'", state["step"])
    saved = parts_of("the state's 'optimizer'", state["optimizer"], ("state", "param_groups"))
    states = parts_of("the state of the optimizer", saved["state"])
    if not isinstance(saved["param_groups"], (list, tuple)):
        raise TypeError(f"the 'param_groups' of the state's 'optimizer' are {saved['param_groups']!r:.40}, and no list; {SAVED}")
    groups = [parts_of(f"group {k} of the state's 'optimizer'", group, ("params",)) for k, group in enumerate(saved["param_groups"])]
    own = step.optimizer.param_groups
    check_groups([list(group["params"]) for group in groups], [[step.owned.name(p) for p in group["params"]] for group in own])
    if unknown := sorted(set(states) - set(named), key=str):
        raise ValueError(f"the optimizer has no parameter {unknown[0]}, of which the state has one")
    for here, group in zip(own, groups, strict=True):
        for name in filter(states.__contains__, group["params"]):
            values = parts_of(f"the state of {name}", states[name])
            step.owned.check(named[name], {**here, **group, "params": here["params"]}, values, begun=steps > 0)
    if step.scaler is not None and "scaler" in state:
        check_scaler(parts_of("the state's 'scaler'", state["scaler"], ("scale", "_growth_tracker")))
    if step.averages is not None:
        if "ema" not in state:
            raise ValueError("the state of a step has no 'ema', the averages of its weights; save it of a step with ema=, or leave ema= out of this one")
        step.averages.check(state["ema"], [name for name, values in states.items() if values])


def _rng(step: TrainStep) -> torch.Tensor:
    """The state of the first rank's generator, from which all seeds come."""
    state, job = torch.get_rng_state(), step.parallel.job
    if job is not None:
        distributed.broadcast(state, group=job.control, group_src=0)
    return state
