"""Call a model whose parameters are on the stages of a pipeline, on this rank or on all simulated ranks."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.capture.guards import GuardedCall
from autopar.capture.model_state import ModelState
from autopar.model.calls import Calls
from autopar.model.captures import Captures, about_recapture
from autopar.model.inputs import CallInputs
from autopar.model.stage_homes import StageHomes
from autopar.runtime.running.carriers import SimulatedCarrier
from autopar.step.pipelined.calls.kept_call import staged_by_cache
from autopar.step.pipelined.calls.staged_call import StagedCall
from autopar.step.pipelined.runs import of_call
from autopar.step.run import StepRunner, carrier_here
from autopar.step.running import StepRuns


class StagedCalls:
    """The calls of a model whose parameters are on stages.

    Args:
        calls: the calls of the model; they know where the parameters are.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._clear()

    def _clear(self) -> None:
        calls = self._calls
        self._captures: Captures[StagedCall] = Captures()
        self._runs: dict[int, StepRuns] = {}
        self._homes: StageHomes | None = calls.homes
        if calls.job is None:
            self._runner = StepRunner(calls, lambda: SimulatedCarrier(calls.mesh.ranks, calls.device))
        else:
            self._runner = StepRunner(calls, lambda: carrier_here(calls, offload=False))

    def known(self, inputs: CallInputs, state: ModelState) -> GuardedCall:
        """Return the call with the values that forward would read now."""
        if self._homes is not self._calls.homes:
            self._clear()
        return self._captures.call(self._calls.key(inputs, state), state.modules)

    def compiled(self, inputs: CallInputs, call: GuardedCall) -> StagedCall:
        """Return the capture of a call; capture it first if it is new. All ranks call it."""
        calls = self._calls
        if not call.known:
            assert self._homes is not None
            notes = about_recapture(call.key, self._captures.keys, call.changes, calls.recapture)
            compiler = replace(calls.compiler, numbers=call.numbers)
            made = staged_by_cache(compiler, inputs, self._homes, notes)
            calls.agreement.compare_programs(made.text, made.captured.guards)
            self._captures.add(call, made.captured.guards, made)
        return self._captures[call]

    def run(self, call: StagedCall, inputs: CallInputs, state: ModelState) -> list[torch.Tensor]:
        """Run a call on the ranks of this process. Returns its outputs."""
        if id(call) not in self._runs:
            self._runs[id(call)] = of_call(call, self._calls.mesh)
        (_, outputs), _ = self._runner([inputs], state, call, self._runs[id(call)], {})
        return outputs
