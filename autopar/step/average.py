"""Averages: the exponential moving average (EMA) of the weights, as state of a step.

As ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``, updated behind every step: the first step copies the
weights, and a step that overflowed changes nothing. They lie as the optimizer's state does, so ZeRO splits them. What is not
trained is its own average: frozen parameters, also those that were trained before, and buffers, which ``AveragedModel`` copies
(``use_buffers=False``). A step whose loss does not depend on a parameter leaves its average as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from autopar.shards import for_model, is_dtensor, local_of
from autopar.step.owned import Owned
from autopar.step.update import AVERAGE, AVERAGES, Trained


class Averages:
    """The averages of an optimizer's parameters.

    Attributes:
        tensors: by the user's name of the parameter; on processes DTensors. Updated in place.
        count: how many steps were averaged; int64, without dims.
        pieces: this process's, as the update takes them: ``up.weight.ema``; and their count.
        lent: whether the model has them now, in the place of its weights.
    """

    def __init__(self, owned: Owned, device: torch.device) -> None:
        self.owned = owned
        self.tensors: dict[str, torch.Tensor] = {}
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.pieces: dict[str, torch.Tensor] = {}
        self.lent = False
        self._trained: tuple[Trained, ...] = ()

    @torch.no_grad()
    def lie(self, trained: tuple[Trained, ...]) -> None:
        """Bring them to lie as the optimizer's state does; a new one begins as the weight. All ranks call it."""
        if trained is self._trained:
            return
        groups = self.owned.groups()
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if name in groups}
        for t in trained:
            parameter = groups[t.name][1]
            known = self.tensors.get(t.name)
            self.tensors[t.name] = self.owned.laid(parameter.detach().clone() if known is None else known, parameter, t.state)
        self.pieces = {AVERAGES: self.count, **{name + AVERAGE: local_of(tensor) for name, tensor in self.tensors.items()}}
        self._trained = trained

    def state_dict(self) -> dict[str, Any]:
        """``weights``, by the user's names, and their ``count``; not copies."""
        return {"count": self.count, "weights": dict(self.tensors)}

    def check(self, state: Mapping[str, Any]) -> None:
        """``ValueError`` where a state is none of these averages; all that is wrong is told by name."""
        if missing := [part for part in ("count", "weights") if part not in state]:
            raise ValueError(f"the state's 'ema' has no {missing[0]!r}, but {', '.join(map(repr, state)) or 'nothing'}; save what step.state_dict() gives")
        shapes = {self.owned.name(parameter): list(parameter.shape) for group in self.owned.optimizer.param_groups for parameter in group["params"]}
        for name, value in state["weights"].items():
            if name not in shapes:
                raise ValueError(f"the state's 'ema' has {name}, which is no parameter of the optimizer")
            if list(value.shape) != shapes[name]:
                raise ValueError(f"the state's 'ema' has {name} of shape {list(value.shape)}, and the parameter is {shapes[name]}: it is of another model")

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state: full tensors are cut, DTensors are re-laid. What it has not begins as the weight. All ranks call it."""
        groups = self.owned.groups()
        given = {name: value for name, value in state["weights"].items() if name in groups}
        own = {name: self.tensors[name] if name in self.tensors else groups[name][1].detach().clone() for name in given}
        laid = for_model({name: value for name, value in given.items() if own[name] is not value}, own, self.owned.job)
        for name, value in laid.items():
            own[name].copy_(value)
        self.tensors, self._trained = own, ()
        self.count.fill_(int(state["count"]))

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The model has the averages, and then its weights again, bit for bit: these are kept in copies. All ranks call it."""
        self.refuse_while_lent()
        groups = self.owned.groups()
        pairs = [(parameter, self.tensors[name]) for name, (_, parameter) in groups.items() if name in self.tensors]
        kept = [parameter.detach().clone() for parameter, _ in pairs]
        self.lent = True
        try:
            _write([(parameter, as_it_lies(tensor, parameter)) for parameter, tensor in pairs])
            yield
        finally:
            _write([(parameter, weights) for (parameter, _), weights in zip(pairs, kept, strict=True)])
            self.lent = False

    def refuse_while_lent(self) -> None:
        """``RuntimeError`` inside of ``in_model``: what is done with the weights would be done with their averages."""
        if self.lent:
            raise RuntimeError("the model has the averages of its weights: leave the block of step.averaged() first")


def as_it_lies(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A DTensor, re-laid as a parameter lies."""
    return tensor.to(local_of(parameter).device).redistribute(placements=parameter.placements) if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


@torch.no_grad()
def _write(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for parameter, value in pairs:
        parameter.copy_(value)
