"""Run rotated steps: each step first finishes the one before, and leaves collectives under way for the next one.

The first step runs without the phase ``finish`` of the rotated program, and ``finish`` alone completes the last step.
Of several micro-batches, the first runs the begin of the rotated program, and the last its end (``run_parts``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autopar.capture.model_state import ModelState
from autopar.ir.program import Program
from autopar.ir.value_names import SCALE, batch_input_name, copy_name
from autopar.model.inputs import CallInputs
from autopar.runtime import anomaly
from autopar.runtime.anomaly import nth
from autopar.runtime.turns import ProcessTurn, SimulatedTurn, taken_by_finish
from autopar.runtime.whole import Pieces, Results, SimulatedRun
from autopar.scheduling.programs.order import donated_names
from autopar.scheduling.programs.run_parts import RunPart
from autopar.step.compiling.compiled_step import MicroBatch, StepUpdate
from autopar.step.compiling.outputs import join_pieces, join_whole
from autopar.step.runs import (
    OnProcess,
    Returned,
    Simulated,
    brought_pieces,
    cut_pieces,
    joined_values,
    write_states,
    zero_sums,
)

FINISH = "the end of the step before"  # in errors


@dataclass
class UnderWay:
    """The values that a step has left for the next one.

    Attributes:
        micro, update: the programs of the step.
        pieces: rank → placeholder of the rotated program → the piece under way.
        numbers: the numbers of the step that its updates read, such as the learning rate, by the user's names.
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
    """Runs rotated steps on this rank.

    Attributes:
        whole: runs steps that end complete. Here it makes the first low-precision copies, and runs the inner
            micro-batches.
    """

    whole: OnProcess
    _runs: dict[tuple[int, RunPart], ProcessTurn] = field(default_factory=dict)

    def __call__(self, batch: Sequence[CallInputs], model: ModelState, micro: MicroBatch, update: StepUpdate,
                 state: Mapping[str, torch.Tensor], before: UnderWay | None) -> tuple[Returned, UnderWay]:  # fmt: skip
        """Run the step of a batch. Returns what ``OnProcess`` does, and what is under way.

        Args:
            before: what the step before has left, if there is anything.
        """
        calls = self.whole.calls
        rank, taken = calls.context().rank, Results(micro.program)
        pieces = [calls.tensors.pieces(inputs, model, taken.interface, rank).tensors for inputs in batch]
        names = [taken.names[of] for of in taken.interface.arguments]
        count = len(model.parameters) + len(model.buffers)
        tensors: Pieces = {**dict(zip(names[:count], pieces[0][:count], strict=True)), **state}
        brought = [dict(zip(names[count:], own[count:], strict=False)) for own in pieces]
        if anomaly.is_on():
            anomaly.refuse_nan(model, dict(zip(names[:count], pieces[0], strict=False)), brought, state, rank)
        del pieces
        held: Pieces = {} if before is not None else self.whole.copies(micro, tensors)
        outputs, returned = list[list[torch.Tensor]](), list[torch.Tensor]()
        total, left, types = len(batch), Pieces(), [type for _, type in taken.interface.returned]
        for k, (part, own) in enumerate(zip(parts_of(total, before is not None), brought, strict=True), 1):
            values = {**tensors, **held, **own, **calls.computed(micro.captured)}
            if part is None:
                low = {name: held[copy_name(name)] for name in tensors if copy_name(name) in held}
                inner = self.whole.run_of(micro.program, micro.local)
                returned, named = self.whole.called(inner, values | low, during=nth(k, total))
            else:
                run = self._run(update, part)
                if k == 1:
                    values |= _numbered(brought) if micro.first else {}
                    values |= {} if before is None else before.numbers
                taken_over = {run.named[name]: tensor for name, tensor in values.items() if name in run.named}
                taken_over |= before.pieces[rank] if k == 1 and before is not None else {}
                zeros = frozenset(run.named[name] for name in run.sums) if k == 1 else frozenset[str]()
                values.clear()
                if k == total:
                    held.clear()  # the update may free what it has read
                if k == 1:
                    _take(before)
                returned, states = run(taken_over, zeros, nth(k, total))
                left = _popped(states, run.handed)
                named = {run.names[of]: tensor for of, tensor in states.items()}
            outputs.append(returned[: len(types)])
            held |= _written(named, tensors)
        joined = [
            join_pieces(output, parts, type, calls.tensors, brought_pieces(batch[0], calls.mesh))
            for output, type, *parts in zip(micro.outputs, types, *outputs, strict=True)
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
        _written({run.names[of]: tensor for of, tensor in states.items()}, left.tensors)

    def _run(self, update: StepUpdate, part: RunPart) -> ProcessTurn:
        """Return a part of the rotated step of this rank as a function."""
        program, local = update.last
        if (id(program), part) not in self._runs:
            calls = self.whole.calls
            context, job = calls.context(), calls.job
            gate = None if context.agreement is None else context.agreement.finish
            device = torch.device("cpu") if job is None else job.device
            self._runs[id(program), part] = ProcessTurn(
                program, local[context.rank], context.groups_for(local), gate, device,
                donated_names(program, update.states), SCALE in Results(program).named, self.whole.offload, part,
                update.sums, context.regions,
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
    """Runs rotated steps of all ranks in this process, on full tensors. What is under way is complete.

    Attributes:
        whole: as of ``TurnsOnProcess``.
    """

    whole: Simulated
    _runs: dict[int, SimulatedTurn] = field(default_factory=dict)

    def __call__(self, batch: Sequence[CallInputs], model: ModelState, micro: MicroBatch, update: StepUpdate,
                 state: Mapping[str, torch.Tensor], before: UnderWay | None) -> tuple[Returned, UnderWay]:  # fmt: skip
        """Run the step of a batch on all ranks. Arguments and results are as those of ``TurnsOnProcess``."""
        calls, run, taken = self.whole.calls, self._run(update), self.whole.run_of(micro.program, micro.local)
        tensors: Pieces = {name: tensor.detach() for name, tensor in (*model.parameters, *model.buffers)}
        names = [taken.names[of] for of in taken.interface.arguments[len(tensors) :]]
        brought = [dict(zip(names, inputs.arguments.tensors, strict=False)) for inputs in batch]
        if anomaly.is_on():
            anomaly.refuse_nan(model, tensors, brought, state)
        copies = self.whole.copies(micro, taken, tensors) if before is None else {}
        tensors |= state
        held = {  # rank → what its micro-batches hand on, by the user's names
            rank: {
                **{run.names[of]: piece for of, piece in zero_sums(run, rank, tensors).items()},
                **{copy_name(taken.names[of]): piece for of, piece in copies.get(rank, {}).items()},
            }
            for rank in calls.mesh.ranks
        }
        outputs, returned, left, total = list[list[torch.Tensor]](), list[torch.Tensor](), {}, len(batch)
        for k, (part, own) in enumerate(zip(parts_of(total, before is not None), brought, strict=True), 1):
            values = {**tensors, **own, **calls.computed(micro.captured)}
            program: SimulatedRun = taken if part is None else run
            if k == 1:
                values |= _numbered(brought) if micro.first else {}
                values |= {} if before is None else before.numbers
            pieces = {
                rank: {**cut_pieces(program, values, rank), **_named(program, held[rank], low=part is None)}
                for rank in calls.mesh.ranks
            }
            if k == 1 and before is not None:
                pieces = {rank: own | before.pieces[rank] for rank, own in pieces.items()}
                _take(before)
            results = taken(pieces, nth(k, total)) if part is None else run.run(part, pieces, nth(k, total))
            if part is not None:
                left = {rank: _popped(states, run.handed) for rank, (_, states) in results.items()}
            write_states(program, tensors, {rank: states for rank, (_, states) in results.items()})
            for rank, (_, states) in results.items():
                named = {program.names[of]: piece for of, piece in states.items()}
                held[rank] |= {name: piece for name, piece in named.items() if name not in tensors}
            returned = joined_values(program, results)
            outputs.append(returned[: len(micro.outputs)])
        joined = [join_whole(output, parts) for output, *parts in zip(micro.outputs, *outputs, strict=True)]
        kept = {name: state[name] for name in taken_by_finish(next(iter(update.last[1].values())))}
        return (returned[len(micro.outputs) :], joined), UnderWay(micro, update, left, kept, tensors)

    def finish(self, left: UnderWay) -> None:
        """Complete a step."""
        run, values = self._run(left.update), {**left.tensors, **left.numbers}
        pieces = {rank: {**cut_pieces(run, values, rank), **own} for rank, own in left.pieces.items()}
        results = run.run("finish", pieces, FINISH)
        write_states(run, left.tensors, {rank: states for rank, (_, states) in results.items()})

    def _run(self, update: StepUpdate) -> SimulatedTurn:
        program, local = update.last
        if id(program) not in self._runs:
            scaled = SCALE in Results(program).named
            self._runs[id(program)] = SimulatedTurn(program, local, scaled, update.sums)
        return self._runs[id(program)]

    def forget(self, program: Program) -> None:
        """Drop a program that does not run again."""
        self._runs.pop(id(program), None)


def parts_of(count: int, behind: bool) -> list[RunPart | None]:
    """Return for each micro-batch of a step the part of the rotated step that it runs; ``None`` for an inner one.

    Args:
        behind: whether the step before has left something under way.
    """
    if count == 1:
        return ["whole" if behind else "begin"]
    return ["first" if behind else "first alone", *[None] * (count - 2), "last"]


def _take(before: UnderWay | None) -> None:
    if before is not None:
        before.taken = True


def _popped(pieces: Pieces, names: Collection[str]) -> Pieces:
    return {name: pieces.pop(name) for name in names if name in pieces}


def _written(named: Pieces, tensors: Pieces) -> Pieces:
    """Copy the next values of states to the tensors that are not their memory. Returns those that have no tensor."""
    for name, value in named.items():
        if name in tensors and value is not tensors[name]:
            tensors[name].copy_(value)
    return {name: value for name, value in named.items() if name not in tensors}


def _numbered(brought: Sequence[Pieces]) -> Pieces:
    """Return the inputs of all micro-batches, by their names in the program of the counts."""
    return {batch_input_name(name, k): tensor for k, own in enumerate(brought) for name, tensor in own.items()}


def _named(run: SimulatedRun, held: Pieces, *, low: bool) -> Pieces:
    """Return the values that micro-batches hand on, by placeholder. ``low``: whether copies replace parameters."""
    names = {copy_name(name): of for name, of in run.named.items()} if low else {}
    return {names.get(name) or run.named[name]: v for name, v in held.items() if name in names or name in run.named}
