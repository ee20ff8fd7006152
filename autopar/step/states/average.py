"""Keep the exponential moving average (EMA) of the weights, as state of a step.

The averages are those of ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``, updated after
every step. The first step copies the weights, and a step that overflowed changes nothing. An average has the layout of
the optimizer's state, so ZeRO shards it. That of a parameter that was trained before, and is now frozen or not reached
by the loss, moves on towards the weight. A parameter that was never trained is its own average and takes no memory; so
is a buffer, which ``AveragedModel`` copies (``use_buffers=False``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from autopar.ir.value_names import AVERAGES, average_name
from autopar.model.dtensor_parameters import holds_part_of, local_of, placed_on
from autopar.model.state_dicts import fitted_to
from autopar.optimizers import AVERAGED
from autopar.optimizers.update import COUNTED
from autopar.runtime.dtensors import is_dtensor
from autopar.runtime.processes.job import Job
from autopar.step.compiling.update import Trained
from autopar.step.states.fit import check_tensor, number_of, parts_of
from autopar.step.states.optimizer_state import OptimizerState
from autopar.torch_private import version_of


class Averages:
    """The averages of an optimizer's parameters.

    Attributes:
        optimizer_state: the optimizer and its state.
        decay: the share of the old average in a new one.
        tensors: the averages of what was ever trained, by the user's name of the parameter; DTensors on processes.
            Updated in place.
        count: the number of averaged steps; int64, without dims.
        pieces: this process's pieces, by the names that the update has for them: ``up.weight.ema``; and the count.
            Parameters of other stages have no pieces.
        lent: whether the model has the averages now, in the place of its weights.
    """

    def __init__(self, optimizer_state: OptimizerState, decay: float, device: torch.device) -> None:
        self.optimizer_state, self.decay = optimizer_state, decay
        self.tensors: dict[str, torch.Tensor] = {}
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.pieces: dict[str, torch.Tensor] = {}
        self.lent = False
        self._trained: tuple[Trained, ...] = ()
        self._elsewhere: int | None = None  # the version of the count, if all parameters are on other stages

    @torch.no_grad()
    def place(self, trained: tuple[Trained, ...]) -> None:
        """Give the averages the layouts of the optimizer's state. All ranks call it.

        A new average begins as the weight.
        """
        if trained is self._trained:
            return
        groups = self.optimizer_state.groups()
        for t in trained:
            parameter = groups[t.name][1]
            known = self.tensors.get(t.name)
            self.tensors[t.name] = self.optimizer_state.placed(
                parameter.detach().clone() if known is None else known, parameter, t.state
            )
        here = {name: local_of(tensor) for name, tensor in self.tensors.items() if holds_part_of(tensor)}
        self.pieces = {AVERAGES: self.count, **{average_name(name): piece for name, piece in here.items()}}
        self._elsewhere = None if any(t.name in here for t in trained) else version_of(self.count)
        self._trained = trained

    @torch.no_grad()
    def finish(self, found_inf: torch.Tensor | None = None) -> None:
        """Update the averages of what the step did not train. All ranks call it.

        Count the step on a rank whose stage has no average, unless an update there has counted it.

        Args:
            found_inf: 1 if the step has overflowed and changes nothing, else 0; ``None``: it cannot overflow.
        """
        if self._elsewhere is not None:
            if version_of(self.count) == self._elsewhere:
                self.count.copy_(COUNTED(self.count, found_inf))
            self._elsewhere = version_of(self.count)
        trained = {t.name for t in self._trained}
        for name, tensor in self.tensors.items():
            if name not in trained:
                self._update(tensor, self.optimizer_state.parameters[name], found_inf)

    def _update(self, tensor: torch.Tensor, parameter: torch.Tensor, found_inf: torch.Tensor | None) -> None:
        weight = with_layout_of(parameter, tensor, self.optimizer_state.job) if is_dtensor(tensor) else parameter
        piece = local_of(tensor)
        numbers = [None if number is None else number.to(piece.device) for number in (self.count, found_inf)]
        piece.copy_(AVERAGED(piece, local_of(weight).to(piece.device), *numbers, decay=self.decay))

    def all(self) -> dict[str, torch.Tensor]:
        """Return the average of each parameter of the model, by the user's names; not copies."""
        parameters = self.optimizer_state.parameters
        return {name: self.tensors.get(name, parameter.detach()) for name, parameter in parameters.items()}

    def state_dict(self) -> dict[str, object]:
        """``weights``, by the user's names, and their ``count``; not copies. What was never trained is left out."""
        return {"count": self.count, "weights": dict(self.tensors)}

    def check(self, state: object, updated: Collection[str] = ()) -> None:
        """Raise ``ValueError`` if a saved state does not fit these averages. The error names the parameter.

        ``updated``: the parameters that were trained before the state was saved: each has an average, if any parameter
        has.
        """
        saved = parts_of("the state's 'ema'", state, ("count", "weights"))
        weights = parts_of("the averages of the state's 'ema'", saved["weights"])
        number_of("the count of the state's 'ema'", saved["count"])
        parameters, groups = self.optimizer_state.parameters, self.optimizer_state.groups()
        for name, value in weights.items():
            if name not in parameters:
                raise ValueError(f"the state's 'ema' has {name}, which is no parameter of the model")
            check_tensor("the state's 'ema'", name, value, parameters[name].shape, "the parameter")
        # a saved state does not tell whether they were trained
        for name in groups if weights else ():
            trained = name in updated or (name in self.tensors and not self.optimizer_state.keeps_state(name))
            if trained and name not in weights:
                raise ValueError(
                    f"the state's 'ema' has no average of {name}, which is trained, but of {len(weights)} others; "
                    f"save what step.state_dict() gives, or let it begin as the weight: "
                    f"state['ema']['weights'][{name!r}] = state['model'][{name!r}]"
                )

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state. All ranks call it.

        Full tensors are sharded, DTensors are redistributed. An average that the state does not have begins as the
        weight.
        """
        parameters = self.optimizer_state.parameters
        saved = {name: state["weights"][name] for name in parameters if name in state["weights"]}
        tensors = {
            name: self.tensors[name] if name in self.tensors else parameters[name].detach().clone() for name in saved
        }
        fitted = fitted_to(
            {name: value for name, value in saved.items() if tensors[name] is not value},
            tensors,
            self.optimizer_state.job,
        )
        for name, value in fitted.items():
            tensors[name].copy_(value)
        self.tensors, self._trained = tensors, ()
        self.count.fill_(int(state["count"]))

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Put the averages into the model while the ``with`` block runs. All ranks call it.

        Then the model gets its weights back, bit for bit, from copies.
        """
        self.refuse_while_lent()
        pairs = [(p, self.tensors[name]) for name, p in self.optimizer_state.parameters.items() if name in self.tensors]
        saved = [parameter.detach().clone() for parameter, _ in pairs]
        self.lent = True
        try:
            self._write(pairs)
            yield
        finally:
            self._write([(parameter, weights) for (parameter, _), weights in zip(pairs, saved, strict=True)])
            self.lent = False

    @torch.no_grad()
    def _write(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Write values to parameters, which may have left their stages since the values were taken."""
        for parameter, value in pairs:
            parameter.copy_(with_layout_of(value, parameter, self.optimizer_state.job))

    def refuse_while_lent(self) -> None:
        """Raise ``RuntimeError`` inside of ``in_model``, where the model's weights are the averages."""
        if self.lent:
            raise RuntimeError("the model has the averages of its weights: leave the block of step.averaged() first")


def with_layout_of(tensor: torch.Tensor, other: torch.Tensor, job: Job | None) -> torch.Tensor:
    """Return a tensor with the device, the mesh and the placements of another; a plain tensor stays as it is."""
    if not is_dtensor(tensor):
        return tensor
    assert is_dtensor(other) and job is not None
    return placed_on(tensor.to(local_of(other).device), other.device_mesh, other.placements, job)
