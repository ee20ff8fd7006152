"""Run steps of which something crosses the end: each step first finishes the one before.

The first step runs without the phase ``finish`` of the rotated program, and ``finish`` alone completes the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autopar.capture.model_state import ModelState
from autopar.ir.program import Program
from autopar.ir.value_names import SCALE
from autopar.model.calls import Calls
from autopar.model.inputs import CallInputs
from autopar.runtime import anomaly
from autopar.runtime.anomaly import nth
from autopar.runtime.turns import ProcessTurn, SimulatedTurn, taken_by_finish
from autopar.runtime.whole import Pieces, Results
from autopar.scheduling.programs.functions import RunPart
from autopar.scheduling.programs.order import donated_names
from autopar.step.compiled_step import MicroBatch, StepUpdate
from autopar.step.outputs import join_pieces, join_whole
from autopar.step.runs import Returned, brought_pieces, cut_pieces, joined_values, write_states, zero_sums

FINISH = "the end of the step before"  # in errors


@dataclass
class UnderWay:
    """What a step has left for the next one.

    Attributes:
        micro, update: the programs of the step.
        pieces: rank → placeholder of the rotated program → what is under way.
        numbers: the numbers of the step that its updates read, by the user's names.
        tensors: the tensors that the updates read and write, by the user's names.
        taken: whether a step has begun to complete it.
    """

    micro: MicroBatch
    update: StepUpdate
    pieces: Mapping[int, Pieces]
    numbers: Pieces
    tensors: Pieces
    taken: bool = False


@dataclass
class TurnsOnProcess:
    """Runs rotated steps on this rank. Its attributes are those of ``OnProcess``."""

    calls: Calls
    offload: bool = False
    _runs: dict[tuple[int, RunPart], ProcessTurn] = field(default_factory=dict)

    def __call__(self, batch: Sequence[CallInputs], model: ModelState, micro: MicroBatch, update: StepUpdate,
                 state: Mapping[str, torch.Tensor], before: UnderWay | None) -> tuple[Returned, UnderWay]:  # fmt: skip
        """Run the step of a batch of one micro-batch. Returns what ``OnProcess`` does, and what is under way.

        Args:
            before: what the step before has left, if there is anything.
        """
        calls, rank, (inputs,) = self.calls, self.calls.context().rank, batch
        run, taken = self._run(update, "begin" if before is None else "whole"), Results(micro.program)
        pieces = calls.tensors.pieces(inputs, model, taken.interface, rank).tensors
        names = [taken.names[of] for of in taken.interface.arguments]
        count = len(model.parameters) + len(model.buffers)
        tensors: Pieces = {**dict(zip(names[:count], pieces[:count], strict=True)), **state}
        brought = dict(zip(names[count:], pieces[count:], strict=False))
        if anomaly.is_on():
            anomaly.refuse_nan(model, dict(zip(names[:count], pieces, strict=False)), [brought], state, rank)
        values = {**tensors, **brought, **calls.computed(micro.captured), **({} if before is None else before.numbers)}
        under_way = {} if before is None else before.pieces[rank]
        zeros = frozenset(run.named[name] for name in run.sums)
        _take(before)
        returned, states = run(
            {**{of: values[name] for name, of in run.named.items() if name in values}, **under_way}, zeros, nth(1, 1)
        )
        left = {name: states.pop(name) for name in run.handed if name in states}
        _write_pieces(run, states, tensors)
        types = [type for _, type in taken.interface.returned]
        joined = [
            join_pieces(output, [part], type, calls.tensors, brought_pieces(inputs, calls.mesh))
            for output, type, part in zip(micro.outputs, types, returned, strict=False)
        ]
        numbers = {name: state[name] for name in taken_by_finish(update.last[1][rank])}
        return (returned[len(types) :], joined), UnderWay(micro, update, {rank: left}, numbers, tensors)

    def finish(self, left: UnderWay) -> None:
        """Complete a step. All ranks call it."""
        (under_way,), run = left.pieces.values(), self._run(left.update, "finish")
        values = {**left.tensors, **left.numbers}
        _, states = run(
            {**{of: values[name] for name, of in run.named.items() if name in values}, **under_way}, during=FINISH
        )
        _write_pieces(run, states, left.tensors)

    def _run(self, update: StepUpdate, part: RunPart) -> ProcessTurn:
        """Return a part of the rotated step of this rank as a function."""
        program, local = update.last
        if (id(program), part) not in self._runs:
            context, job = self.calls.context(), self.calls.job
            gate = None if context.agreement is None else context.agreement.finish
            device = torch.device("cpu") if job is None else job.device
            self._runs[id(program), part] = ProcessTurn(
                program, local[context.rank], context.groups_for(local), gate, device,
                donated_names(program, update.states), SCALE in Results(program).named, self.offload, part,
            )  # fmt: skip
        return self._runs[id(program), part]

    def forget(self, program: Program) -> None:
        """Drop a program that does not run again."""
        for key in [key for key in self._runs if key[0] == id(program)]:
            del self._runs[key]

    def clear(self) -> None:
        """Drop all programs."""
        self._runs.clear()


@dataclass
class SimulatedTurns:
    """Runs rotated steps of all ranks in this process, on full tensors. What is under way is complete."""

    calls: Calls
    _runs: dict[int, SimulatedTurn] = field(default_factory=dict)

    def __call__(self, batch: Sequence[CallInputs], model: ModelState, micro: MicroBatch, update: StepUpdate,
                 state: Mapping[str, torch.Tensor], before: UnderWay | None) -> tuple[Returned, UnderWay]:  # fmt: skip
        """Run the step of a batch on all ranks. Arguments and results are as those of ``TurnsOnProcess``."""
        run, (inputs,), taken = self._run(update), batch, Results(micro.program)
        tensors: Pieces = {name: tensor.detach() for name, tensor in (*model.parameters, *model.buffers)}
        names = [taken.names[of] for of in taken.interface.arguments[len(tensors) :]]
        brought = dict(zip(names, inputs.arguments.tensors, strict=False))
        if anomaly.is_on():
            anomaly.refuse_nan(model, tensors, [brought], state)
        tensors |= state
        numbers = {} if before is None else before.numbers
        values = {**tensors, **brought, **numbers, **self.calls.computed(micro.captured)}
        pieces = {
            rank: {
                **cut_pieces(run, values, rank),
                **zero_sums(run, rank),
                **({} if before is None else before.pieces[rank]),
            }
            for rank in self.calls.mesh.ranks
        }
        _take(before)
        results = run.run("begin" if before is None else "whole", pieces, nth(1, 1))
        left = {rank: self._handed(run, states) for rank, (_, states) in results.items()}
        write_states(run, tensors, {rank: states for rank, (_, states) in results.items()})
        returned, count = joined_values(run, results), len(taken.interface.returned)
        outputs = [join_whole(output, [part]) for output, part in zip(micro.outputs, returned[:count], strict=True)]
        local = next(iter(update.last[1].values()))
        kept = {name: state[name] for name in taken_by_finish(local)}
        return (returned[count:], outputs), UnderWay(micro, update, left, kept, tensors)

    def finish(self, left: UnderWay) -> None:
        """Complete a step."""
        run, values = self._run(left.update), {**left.tensors, **left.numbers}
        pieces = {rank: {**cut_pieces(run, values, rank), **own} for rank, own in left.pieces.items()}
        results = run.run("finish", pieces, FINISH)
        write_states(run, left.tensors, {rank: states for rank, (_, states) in results.items()})

    def _handed(self, run: SimulatedTurn, states: Pieces) -> Pieces:
        return {name: states[name] for name in run.handed if name in states}

    def _run(self, update: StepUpdate) -> SimulatedTurn:
        program, local = update.last
        if id(program) not in self._runs:
            self._runs[id(program)] = SimulatedTurn(program, local, SCALE in Results(program).named)
        return self._runs[id(program)]

    def forget(self, program: Program) -> None:
        """Drop a program that does not run again."""
        self._runs.pop(id(program), None)


def _take(before: UnderWay | None) -> None:
    if before is not None:
        before.taken = True


def _write_pieces(run: ProcessTurn, states: Pieces, tensors: Pieces) -> None:
    """Copy the next values of states to the tensors that are not their memory."""
    for placeholder, value in states.items():
        tensor = tensors[run.names[placeholder]]
        if value is not tensor:
            tensor.copy_(value)
