"""The state of a training: what a step goes on from, by the user's names, so that another mesh or another stage of ZeRO can too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

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
        ValueError: a part is missing, or is of another model; nothing has been changed.
    """
    for part in ("model", "optimizer", "rng", "step"):
        if part not in state:
            raise ValueError(f"the state of a step has no {part!r}, but {', '.join(map(repr, state)) or 'nothing'}; save what step.state_dict() gives")
    if step.averages is not None:
        if "ema" not in state:
            raise ValueError("the state of a step has no 'ema', the averages of its weights; save it of a step with ema=, or leave ema= out of this one")
        step.averages.check(state["ema"])
    owned, optimizer = step.owned, step.optimizer
    named = {owned.name(tensor): tensor for group in optimizer.param_groups for tensor in group["params"]}
    given = state["optimizer"]["param_groups"]
    ours = [[owned.name(p) for p in group["params"]] for group in optimizer.param_groups]
    if [list(group["params"]) for group in given] != ours:
        raise ValueError(
            f"the state has other parameter groups: {_told([list(group['params']) for group in given])}, and the optimizer {_told(ours)}; "
            f"make the optimizer with the groups that were saved"
        )
    if unknown := sorted(set(state["optimizer"]["state"]) - set(named)):
        raise ValueError(f"the optimizer has no parameter {unknown[0]}, of which the state has one")
    own = step.parallel.module.state_dict()
    if any(state["model"].get(name) is not tensor for name, tensor in own.items()):
        step.parallel.load_state_dict(state["model"])
    for group, saved in zip(optimizer.param_groups, given, strict=True):
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
    step.steps = int(state["step"])
    owned.forget()


def _rng(step: TrainStep) -> torch.Tensor:
    """The state of the first rank's generator, from which all seeds come."""
    state, job = torch.get_rng_state(), step.parallel.job
    if job is not None:
        distributed.broadcast(state, group=job.control, group_src=0)
    return state


def _told(groups: list[list[str]]) -> str:
    return f"{len(groups)} of {', '.join(str(len(group)) for group in groups)}"
