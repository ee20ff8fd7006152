"""Keep the collectives that a step has left under way, until the next step takes them or the step is completed.

Between two such steps the parameters and the optimizer's state are those before the last update. So autopar's functions
that read or write them complete the step first. A write to a parameter itself is not seen when it happens; it is found
before the next update, and refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autopar.capture.guards import GuardedCall
from autopar.capture.model_state import ModelState
from autopar.model.calls import Calls
from autopar.model.dtensor_parameters import local_of
from autopar.model.inputs import CallInputs
from autopar.optimizers import Update
from autopar.runtime.dtensors import is_dtensor
from autopar.step.captures import StepCaptures
from autopar.step.run import CapturedMicro, Returned, StepRunner, UnderWay
from autopar.step.running import StepRuns
from autopar.step.states.optimizer_state import OptimizerState
from autopar.torch_private import call_before_steps, version_of, without_function_modes

ALIKE = (
    "step.finish() and what completes a step are for all ranks: let all of them, or none, do that between two steps "
    "(a call of the model, state dicts, checkpoints, step.ema, step.averaged(), parallel.close())"
)


@dataclass
class Crossing:
    """Keeps what a step has left under way, if there is anything.

    Attributes:
        calls: the calls of the model, which complete the step before they read parameters.
        optimizer_state: the optimizer and its state.
        failed: the error of a step that has failed after it took what was under way.
    """

    calls: Calls
    optimizer_state: OptimizerState
    failed: BaseException | None = None
    _left: tuple[StepRunner, UnderWay] | None = None
    _dropped: tuple[StepRunner, UnderWay] | None = None
    _facts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _updates: list[Update] = field(default_factory=list)

    def __post_init__(self) -> None:
        optimizer = self.optimizer_state.optimizer
        optimizer.register_state_dict_pre_hook(lambda optimizer: self.finish())
        optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: self.finish())
        call_before_steps(optimizer, self.finish)

    def prepare(self, runner: StepRunner, captured: StepCaptures, call: GuardedCall) -> None:
        """Prepare a step: complete other steps, and this one if its next step does not run the same programs.

        Raises:
            RuntimeError: a step has failed, or somebody has written to a tensor whose update is under way.
        """
        self.calls.complete(but=self)
        self._refuse_failed()
        if self._left is None:
            return
        self._refuse_written()
        kind, left = self._left  # of another program, it is completed before parameters may move
        same = kind is runner and call.known and captured.micros[call] is left.micro
        if not same or self._updates != self._updates_now():
            self.finish()

    def run(self, runner: StepRunner, batch: Sequence[CallInputs], model: ModelState, micro: CapturedMicro,
            runs: StepRuns, state: Mapping[str, torch.Tensor]) -> Returned:  # fmt: skip
        """Run a step that takes what is under way."""
        if self._left is not None and self._left[1].runs is not runs:
            self.finish()
        before = None if self._left is None else self._left[1]
        try:
            returned, left = runner(batch, model, micro, runs, state, before)
        except BaseException as error:
            if before is not None and before.taken:
                self._forget()
                self.failed = error
            raise
        assert left is not None
        self._left, self._dropped = (runner, left), None
        self.calls.unfinished[id(self)] = self.finish
        return returned

    def watch(self) -> None:
        """Record the versions of parameters and optimizer state after a step, to find writes before the next one."""
        if self._left is not None:
            self._facts, self._updates = self._facts_now(), self._updates_now()

    def finish(self) -> None:
        """Complete what is under way. A second call does nothing. All ranks call it.

        Raises:
            RuntimeError: a step has failed, or somebody has written to a tensor whose update is under way.
        """
        self._refuse_failed()
        if self._left is not None:
            self._refuse_written()
            self._complete()

    def forget_failure(self) -> None:
        """Complete what is under way before another state is loaded, even if somebody has written to a parameter.

        Drop it if other ranks have nothing under way. All ranks call it.
        """
        ranks = self.calls.agreement.ranks
        if ranks is not None and ranks.differ("load a state", str(self._left is None)):
            self._dropped = self._left  # its collectives may still write to its memory
            self._forget()
        if self._left is not None:
            self._complete()
        self.failed = None

    def _complete(self) -> None:
        assert self._left is not None
        runner, left = self._left
        self.calls.agreement.announce("finish the step before (across=True)", remedy=ALIKE)
        self.calls.agreement.wait()  # before anything is taken, so that the ranks may go on alike
        self._forget()
        try:
            with torch.inference_mode(False), without_function_modes(), torch.no_grad():
                runner.finish(left)
                self.optimizer_state.finish()
        except BaseException as error:
            self.failed = error
            raise

    def _forget(self) -> None:
        self._left = None
        self.calls.unfinished.pop(id(self), None)

    def _refuse_failed(self) -> None:
        if self.failed is not None:
            raise RuntimeError(
                "a step has failed while the update of the step before was under way, so that some parameters are "
                "updated and others are not: load a state with step.load_state_dict(state). It has failed with "
                f"{type(self.failed).__name__}: {self.failed}"
            ) from self.failed

    def _refuse_written(self) -> None:
        now = self._facts_now()
        for what, before in self._facts.items():
            if what in now and now[what] != before:
                raise RuntimeError(
                    f"{what} was written to or replaced while its update was under way: with across=True, call "
                    f"step.finish() on all ranks before such a write. To go on, load a state with "
                    f"step.load_state_dict(state)"
                )

    def _facts_now(self) -> dict[str, tuple[int, ...]]:
        """Return the version and the memory of each trained parameter and of each tensor of the optimizer's state."""
        optimizer, facts = self.optimizer_state.optimizer, dict[str, tuple[int, ...]]()
        for name, (_, parameter) in self.optimizer_state.groups().items():
            facts[f"the parameter {name}"] = _version(parameter)
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    facts[f"the state {key} of {name}"] = _version(value)
        return facts

    def _updates_now(self) -> list[Update]:
        """Return the present update of each parameter group."""
        definition, optimizer = self.optimizer_state.definition, self.optimizer_state.optimizer
        return [definition.update(group) for group in optimizer.param_groups]


def _version(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return numbers that change with a write to a tensor: its version, that of its piece, and its address."""
    if not is_dtensor(tensor):
        return version_of(tensor), tensor.data_ptr()
    piece = local_of(tensor)
    return version_of(tensor), version_of(piece), piece.data_ptr()
