"""Call a model whose parameters are on the stages of a pipeline, on this rank or on all simulated ranks."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch

from autopar.capture.guards import GuardedCall
from autopar.capture.model_state import ModelState
from autopar.ir.record import TensorType
from autopar.model.calls import Calls
from autopar.model.captures import Captures, about_recapture
from autopar.model.dtensor_parameters import local_of
from autopar.model.inputs import CallInputs
from autopar.model.stage_homes import StageHomes
from autopar.runtime.modes import as_captured
from autopar.runtime.simulation.pieces import cut, join
from autopar.runtime.simulation.simulate import run_together
from autopar.step.compiling.compiled_step import Placed
from autopar.step.pipelined.calls.kept_call import staged_by_cache
from autopar.step.pipelined.calls.staged_call import StagedCall
from autopar.step.pipelined.calls.staged_rank import RankCall
from autopar.step.pipelined.running.functions import Functions, SimulatedFunctions
from autopar.step.pipelined.running.messages import Mail, SimulatedMessages
from autopar.step.pipelined.running.outputs import whole_outputs
from autopar.step.pipelined.running.runs import functions_on_process, inputs_of, messages_on_process, result_of
from autopar.step.pipelined.running.stage_state import Tensors


class StagedCalls:
    """The calls of a model whose parameters are on stages.

    Args:
        calls: the calls of the model; they know where the parameters are.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._captures: Captures[StagedCall] = Captures()
        self._ranks: dict[int, dict[int, RankCall]] = {}
        self._homes: StageHomes | None = None

    def known(self, inputs: CallInputs, state: ModelState) -> GuardedCall:
        """Return the call with the values that forward would read now."""
        if self._homes is not self._calls.homes:
            self._captures, self._ranks, self._homes = Captures(), {}, self._calls.homes
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

    def here(self, call: StagedCall, inputs: CallInputs, state: ModelState) -> list[torch.Tensor]:
        """Run a call on this rank; return its pieces of the outputs."""
        calls = self._calls
        context = calls.context()
        ranks = self._ranks.setdefault(id(call), {})
        if context.rank not in ranks:
            ranks[context.rank] = RankCall(context.rank, call, functions_on_process(calls))
        held = {name: local_of(tensor) for name, tensor in (*state.parameters, *state.buffers)}
        calls.agreement.wait()  # before any other message
        computed = calls.computed(call.captured)
        own = [stage for stage in call.stages if context.rank in stage.mesh]
        each = {stage.number: inputs_of(stage, [inputs], [computed], context.rank)[0] for stage in own}
        with as_captured():
            return list(result_of(ranks[context.rank].run(held, each, messages_on_process(calls))))

    def simulated(self, call: StagedCall, inputs: CallInputs, state: ModelState) -> list[torch.Tensor]:
        """Run a call on all simulated ranks; return the full outputs."""
        calls, mail = self._calls, Mail()
        full = {name: tensor.detach() for name, tensor in (*state.parameters, *state.buffers)}
        computed = calls.computed(call.captured)
        pieces: dict[int, list[torch.Tensor]] = {}
        buffers: dict[str, tuple[TensorType, dict[int, torch.Tensor]]] = {}

        def run(rank: int) -> Generator[Any, Any, None]:
            held: Tensors = {}
            each = {}
            for stage in call.stages:
                if rank not in stage.mesh:
                    continue
                each[stage.number] = inputs_of(stage, [inputs], [computed], rank)[0]
                for name, type in stage.types.items():
                    if name in full and call.homes.stage.get(name, stage.number) == stage.number:
                        layout = call.homes.layouts.get(name)
                        home = type if layout is None else TensorType(type.shape, full[name].dtype, layout)
                        held[name] = cut(full[name], home, home.mesh.coordinates(rank)).clone()
                        if stage.named[name] in stage.interface.states:
                            buffers.setdefault(name, (home, {}))[1][rank] = held[name]

            def functions(placed: Placed) -> Functions:
                return SimulatedFunctions(placed[1][rank], rank)

            made = RankCall(rank, call, functions)
            pieces[rank] = yield from made.run(held, each, SimulatedMessages(rank, mail))

        with as_captured():
            run_together({rank: run(rank) for rank in calls.mesh.ranks})
        for name, (type, of_ranks) in buffers.items():
            full[name].copy_(join(of_ranks, type, name))
        return whole_outputs(call.outputs, pieces, call.stages, call.whole)
