"""Save the state of a training by the user's names, and load it on any mesh and with any stage of ZeRO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from autopar.model.calls import Calls
from autopar.model.state_dicts import with_public_placements
from autopar.plan.loss_scaling import LossScaling
from autopar.step.states.average import Averages
from autopar.step.states.fit import SAVED, check_generator, check_groups, check_model, check_scaler, number_of, parts_of
from autopar.step.states.optimizer_state import OptimizerState


@dataclass(frozen=True)
class TrainingState:
    """The state that a training continues from, except the number of its steps.

    Attributes:
        model: the model on the mesh, which loads full tensors and DTensors.
        calls: the calls of the model.
        optimizer_state: the optimizer and its state.
        averages: the averages of the weights; ``None`` without ``ema``.
        scaler: the scale of the loss, and the number of steps since it was changed; ``None`` without fp16.
        scaling: how the scale changes; it names the parts of the scaler.
    """

    model: torch.nn.Module
    calls: Calls
    optimizer_state: OptimizerState
    averages: Averages | None
    scaler: Sequence[torch.Tensor] | None
    scaling: LossScaling

    def state_dict(self, steps: int) -> dict[str, Any]:
        """Return the state of the training, by the user's names.

        It has the parameters and buffers, the optimizer's state and groups, the averages of the weights, the state of
        the generator of random numbers, and the number of steps. The tensors are those of the training, and not copies,
        but for those with merged dims, which get public placements. On processes they are DTensors. All ranks call it.
        """
        optimizer_state, optimizer = self.optimizer_state, self.optimizer_state.optimizer
        named = {optimizer_state.name(tensor): tensor for group in optimizer.param_groups for tensor in group["params"]}
        state = {name: dict(optimizer.state[tensor]) for name, tensor in named.items() if optimizer.state.get(tensor)}
        groups = [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [optimizer_state.name(p) for p in group["params"]],
            }
            for group in optimizer.param_groups
        ]
        return {
            "model": dict(self.calls.module.state_dict()),
            "optimizer": {"state": with_public_placements(state), "param_groups": groups},
            **({} if self.averages is None else {"ema": with_public_placements(self.averages.state_dict())}),
            **({} if self.scaler is None else {"scaler": self.scaling.state_dict(*self.scaler)}),
            "rng": self._generator(),
            "step": steps,
        }

    def load(self, state: Mapping[str, Any]) -> int:
        """Load a saved state, and return the number of its steps. All ranks call it.

        Full tensors are sharded, DTensors are redistributed.

        Raises:
            TypeError: a part should be a mapping and is not; nothing has been changed.
            ValueError: a part is missing, or does not fit this training; nothing has been changed.
        """
        optimizer_state, optimizer = self.optimizer_state, self.optimizer_state.optimizer
        named = {optimizer_state.name(tensor): tensor for group in optimizer.param_groups for tensor in group["params"]}
        self._check(state, named)
        self.model.load_state_dict(state["model"])
        for group, saved in zip(optimizer.param_groups, state["optimizer"]["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for name, tensor in named.items():
            if name in state["optimizer"]["state"]:
                optimizer.state[tensor] = dict(state["optimizer"]["state"][name])
            else:
                optimizer.state.pop(tensor, None)
        if self.scaler is not None and "scaler" in state:
            for tensor, value in zip(
                self.scaler, (state["scaler"]["scale"], state["scaler"]["_growth_tracker"]), strict=True
            ):
                tensor.fill_(value)
        if self.averages is not None:
            self.averages.load_state_dict(state["ema"])
        torch.set_rng_state(state["rng"].cpu())
        optimizer_state.forget()
        return number_of("the state's 'step'", state["step"])

    def _check(self, state: Mapping[str, object], named: Mapping[str, torch.Tensor]) -> None:
        """Check the whole state before anything is changed. ``named``: the optimizer's parameters."""
        parts_of("the state of a step", state, ("model", "optimizer", "rng", "step"))
        check_model(parts_of("the state's 'model'", state["model"]), self.calls.module.state_dict())
        check_generator(state["rng"])
        steps = number_of("the state's 'step'", state["step"])
        saved = parts_of("the state's 'optimizer'", state["optimizer"], ("state", "param_groups"))
        states = parts_of("the state of the optimizer", saved["state"])
        self._check_groups(saved, states, named, begun=steps > 0)
        if self.scaler is not None and "scaler" in state:
            check_scaler(parts_of("the state's 'scaler'", state["scaler"], ("scale", "_growth_tracker")))
        if self.averages is not None:
            if "ema" not in state:
                raise ValueError(
                    "the state of a step has no 'ema', the averages of its weights; save it of a step with ema=, or "
                    "leave ema= out of this one"
                )
            # Adagrad has the states of all its parameters before they are trained
            updated = [name for name, values in states.items() if values and values.get("step") != 0]
            self.averages.check(state["ema"], updated)

    def _check_groups(
        self, saved: Mapping[str, object], states: Mapping[str, object], named: Mapping[str, torch.Tensor], begun: bool
    ) -> None:
        """Check the optimizer's part of a state. ``begun``: whether steps were taken."""
        if not isinstance(saved["param_groups"], (list, tuple)):
            raise TypeError(
                f"the 'param_groups' of the state's 'optimizer' are {saved['param_groups']!r:.40}, and no list; {SAVED}"
            )
        groups = [
            parts_of(f"group {k} of the state's 'optimizer'", group, ("params",))
            for k, group in enumerate(saved["param_groups"])
        ]
        own_groups = self.optimizer_state.optimizer.param_groups
        check_groups(
            [list(group["params"]) for group in groups],
            [[self.optimizer_state.name(p) for p in group["params"]] for group in own_groups],
        )
        if unknown := sorted(set(states) - set(named), key=str):
            raise ValueError(f"the state has the parameter {unknown[0]}, which the optimizer does not have")
        for own_group, group in zip(own_groups, groups, strict=True):
            for name in filter(states.__contains__, group["params"]):
                values = parts_of(f"the state of {name}", states[name])
                self.optimizer_state.check(
                    named[name], {**own_group, **group, "params": own_group["params"]}, values, begun=begun
                )

    def _generator(self) -> torch.Tensor:
        """Return the state of the first rank's generator of random numbers, which all seeds are drawn from."""
        state, job = torch.get_rng_state(), self.calls.job
        if job is not None:
            distributed.broadcast(state, group=job.control, group_src=0)
        return state
