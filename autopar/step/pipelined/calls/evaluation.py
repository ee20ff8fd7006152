"""Call a model whose parameters are on the stages of a pipeline, on this rank or on all simulated ranks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.capture.guards import GuardedCall
from autopar.capture.model_state import ModelState, model_state
from autopar.capture.model_swap import ONE_AT_A_TIME
from autopar.model.calls import Calls
from autopar.model.captures import Captures, about_recapture
from autopar.model.inputs import CallInputs, describe
from autopar.model.stage_homes import StageHomes
from autopar.runtime.running.carriers import SimulatedCarrier
from autopar.step.pipelined.calls.gradients import Differentiated
from autopar.step.pipelined.calls.staged_call import StagedCall, codec_of_staged, compile_staged
from autopar.step.pipelined.runs import of_call
from autopar.step.run import StepRunner, carrier_here
from autopar.step.running import KnownRuns, StepRuns
from autopar.timetable import Timetable


class StagedCalls:
    """The calls of a model whose parameters are on stages.

    Args:
        calls: the calls of the model; they know where the parameters are.

    Attributes:
        latest: the latest call; ``None`` before the first.
    """

    latest: StagedCall | None = None

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._clear()

    def _clear(self) -> None:
        calls = self._calls
        self._captures: Captures[StagedCall] = Captures()
        self._special: dict[tuple[Hashable, frozenset[int]], StagedCall] = {}  # for the tangents of other outputs
        self._expected: dict[Hashable, frozenset[int]] = {}  # those of the latest backward
        self._runs = KnownRuns()
        self._homes: StageHomes | None = calls.homes
        if calls.job is None:
            self._runner = StepRunner(calls, lambda: SimulatedCarrier(calls.mesh.ranks, calls.device))
        else:
            self._runner = StepRunner(calls, lambda: carrier_here(calls, offload=False))

    def __call__(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        """Call the model on the ranks of this process. Returns its own output structure. All ranks call it."""
        calls = self._calls
        with ONE_AT_A_TIME:
            inputs, state = calls.inputs(calls.bound(args, kwargs)), model_state(calls.module)
            if self._homes is not calls.homes:
                self._clear()
            call = self._captures.call(calls.key(inputs, state), state.modules)
            inputs.refuse_without_values(state)
            words = f"call {describe(inputs.arguments, call.key)}{call.where}"
            if not call.known:
                calls.agreement.all_make(f"{words}, for the first time")
            compiled = self._compiled(inputs, call)
        calls.agreement.announce(words, [inputs], call.numbers_now)
        return compiled.captured.with_tensors(self._run(compiled, inputs, state, call))

    def _compiled(self, inputs: CallInputs, call: GuardedCall) -> StagedCall:
        """Return the capture of a call; capture it first if it is new. All ranks call it."""
        calls = self._calls
        if not call.known:
            assert self._homes is not None
            notes = about_recapture(call.key, self._captures.keys, call.changes, calls.captures.recapture)
            compiler = replace(calls.compiler, numbers=call.numbers)
            homes = self._homes
            made, _ = compiler.once(
                lambda compiler: compile_staged(compiler, inputs, homes, notes),
                lambda: codec_of_staged(compiler, inputs, homes, notes),
            )
            calls.agreement.compare_programs(lambda: made.text, made.captured.guards)
            for older, dropped in self._captures.add(call, made.captured.guards, made):
                self._expected.pop(older.identity, None)
                special = [key for key in self._special if key[0] == older.identity]
                for staged in (dropped, *(self._special.pop(key) for key in special)):
                    for program in self._of(staged).explicit:
                        self._runner.forget(program)
                        self._runs.forget(program)
        return self._with_tangents(call, self._expected.get(call.identity), inputs)

    def _with_tangents(self, call: GuardedCall, positions: frozenset[int] | None, inputs: CallInputs) -> StagedCall:
        """Return the capture of a known call with the tangents of some outputs. All ranks call it."""
        calls, first = self._calls, self._captures[call]
        if positions is None or positions == first.positions:
            return first
        key = call.identity, positions
        if key not in self._special:
            now = calls.call(inputs, model_state(calls.module))
            if now.identity != call.identity:
                raise RuntimeError(
                    f"the model has changed since the call whose backward runs from its outputs "
                    f"{', '.join(map(str, sorted(positions)))} for the first time: run the backward before the change"
                )
            compiler, homes = replace(calls.compiler, numbers=call.numbers), self._homes
            assert homes is not None
            made, _ = compiler.once(
                lambda compiler: compile_staged(compiler, inputs, homes, (), positions),
                lambda: codec_of_staged(compiler, inputs, homes, (), positions),
            )
            calls.agreement.compare_programs(lambda: made.text, made.captured.guards)
            self._special[key] = made
        return self._special[key]

    def _run(self, compiled: StagedCall, inputs: CallInputs, state: ModelState, call: GuardedCall
             ) -> list[torch.Tensor]:  # fmt: skip
        """Run a call on the ranks of this process. Returns its outputs."""
        runs = self._of(compiled)
        self.latest = compiled
        with torch.no_grad():
            if not compiled.captured.differentiable:
                (_, outputs), _ = self._runner([inputs], state, compiled, runs, {})
                return outputs
            computed = self._calls.computed(compiled.captured)
            before = {name: buffer.clone() for name, buffer in state.buffers if name in runs.written}

        def special(positions: frozenset[int]) -> StagedCall:
            self._expected[call.identity] = positions
            with ONE_AT_A_TIME, torch.enable_grad():
                return self._with_tangents(call, positions, inputs)

        def agree(positions: Sequence[int]) -> None:
            said = f"backward from its outputs {', '.join(map(str, positions))}"
            self._calls.agreement.announce(f"{said} of {describe(inputs.arguments, call.key)}")
            self._calls.agreement.wait()

        return Differentiated(compiled, special, self._of, self._runner, agree, inputs, state, computed, before)()

    @property
    def timetable(self) -> Timetable | None:
        """What each rank has run in the latest call; ``None`` before the first."""
        return None if self.latest is None else self._of(self.latest).timetable

    def _of(self, call: StagedCall) -> StepRuns:
        return self._runs.of(call, None, lambda: of_call(call, self._calls.mesh))
