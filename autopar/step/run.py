"""Run a step on the ranks of this process: cut or take their pieces, run their lines, and join what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from autopar.capture import Captured
from autopar.capture.model_state import ModelState
from autopar.errors import SimulationError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.value_names import batch_input_name
from autopar.model.calls import Calls
from autopar.model.inputs import CallInputs, piece_of, refuse_without_values
from autopar.runtime import anomaly
from autopar.runtime.anomaly import nth
from autopar.runtime.current_op import where_raised
from autopar.runtime.processes.agreement import is_refused_by_all
from autopar.runtime.processes.watch.traces import with_place
from autopar.runtime.processes.watch.wording import at
from autopar.runtime.running.carriers import Carrier, ProcessCarrier, SimulatedCarrier, same_on_all
from autopar.runtime.running.functions import PlacedProgram, Where
from autopar.runtime.running.messages import Messages, recorded
from autopar.runtime.running.programs import RankProgram, output_name
from autopar.runtime.running.rank import RankRun, Tensors
from autopar.runtime.simulation.pieces import join
from autopar.runtime.spans import span
from autopar.step.compiling.outputs import Output, join_pieces, join_whole
from autopar.step.running import StepRuns
from autopar.timetable import Entry, Timetable

# the values that the update returns, by name, and the outputs of all micro-batches
Returned = tuple[Tensors, list[torch.Tensor]]
FINISH = "the end of the step before"  # in errors
WORDS = {  # (program, part) → what errors call it
    ("count", "whole"): "the counts of all micro-batches", ("copy", "whole"): "the low-precision copies of parameters",
    ("turn", "finish"): FINISH,
}  # fmt: skip
OF_STAGES = {  # the same, of a stage
    ("copy", "whole"): "the copies of parameters", ("sums", "whole"): "the counts of all micro-batches",
    ("count", "whole"): "the counts of all micro-batches", ("share", "whole"): "the outputs and buffers of all stages",
    ("update", "whole"): "the update",
}  # fmt: skip


class CapturedMicro(Protocol):
    """What a step needs to know of a captured micro-batch."""

    @property
    def captured(self) -> Captured: ...

    @property
    def outputs(self) -> tuple[Output, ...]: ...


@dataclass
class UnderWay:
    """The values that a step has left for the next one.

    Attributes:
        micro: what was captured.
        runs: what the step runs.
        started: rank → what is under way, by placeholder of the rotated program, and the numbers of the step that its
            updates read, such as the learning rate, by the user's names.
        tensors: the tensors that the updates read and write, by the user's names.
        taken: whether a step has begun to complete it.
    """

    micro: CapturedMicro
    runs: StepRuns
    started: Mapping[int, Tensors]
    tensors: Tensors
    taken: bool = False


@dataclass
class StepRunner:
    """Runs steps on the ranks of this process.

    Attributes:
        calls: the calls of the model.
        carrier: makes what carries the ranks.
    """

    calls: Calls
    carrier_of: Callable[[], Carrier]
    _programs: dict[tuple[int, str, int], tuple[Program, RankProgram]] = field(default_factory=dict)
    _made: list[Carrier] = field(default_factory=list)  # none or one
    _failed: str = ""  # where a step on stages has failed

    @property
    def carrier(self) -> Carrier:
        """What carries the ranks; made when a step first runs."""
        if not self._made:
            self._made.append(self.carrier_of())
        return self._made[0]

    def __call__(
        self,
        batch: Sequence[CallInputs],
        model: ModelState,
        micro: CapturedMicro,
        runs: StepRuns,
        state: Mapping[str, torch.Tensor],
        before: UnderWay | None = None,
    ) -> tuple[Returned, UnderWay | None]:
        """Run the step of a batch. Returns what the step returns, and what it has left under way.

        Args:
            batch: the inputs of each micro-batch.
            model: the model's parameters and buffers, which are updated in place.
            micro: what was captured, and how outputs are joined.
            runs: what runs.
            state: the other inputs and states of the update, by the user's names; states are updated in place.
            before: what the step before has left, if there is anything.
        """
        tensors: Tensors = dict((*model.parameters, *model.buffers))
        if isinstance(self.carrier, ProcessCarrier) and not runs.is_staged:
            self.calls.tensors.check_parameters(model.parameters)
        computed = self.calls.computed(micro.captured, len(batch))
        made = self._begun(batch, model, runs, tensors, state, computed)
        table = runs.alone if before is None else runs.timetable
        left = self._run(micro, runs, table, made, {**tensors, **state}, before)
        returned = {
            label: same_on_all(label, {rank: run.returned[label] for rank, run in made.items()})
            for label in next(iter(made.values())).returned
        }
        return (returned, self._joined(runs, micro.outputs, made, batch)), left

    def begin(
        self, batch: Sequence[CallInputs], model: ModelState, micro: CapturedMicro, runs: StepRuns, tensors: Tensors,
        computed: Sequence[Tensors],
    ) -> tuple[dict[int, RankRun], list[torch.Tensor]]:  # fmt: skip
        """Run the forward of a call on stages. Returns the ranks, for ``complete``, and the outputs.

        Args:
            tensors: the model's parameters and buffers; buffers are updated in place.
            computed: as of ``Calls.computed``.
        """
        made = self._begun(batch, model, runs, tensors, {}, computed)
        self._lines(runs, runs.alone, made, tensors)
        return made, self._joined(runs, micro.outputs, made, batch)

    def complete(self, runs: StepRuns, made: Mapping[int, RankRun]) -> None:
        """Run the backward of a call on stages."""
        assert runs.end is not None
        self._lines(runs, runs.end, made, {})

    def _begun(self, batch: Sequence[CallInputs], model: ModelState, runs: StepRuns, tensors: Tensors,
               state: Mapping[str, torch.Tensor], computed: Sequence[Tensors]) -> dict[int, RankRun]:  # fmt: skip
        """Return each rank with what it begins with."""
        if isinstance(self.carrier, ProcessCarrier):
            refuse_without_values([*tensors.items(), *(named for inputs in batch for named in inputs.named)])
        made = self._rank_runs(runs, batch, computed, tensors, state)
        if anomaly.is_on():
            if runs.is_staged:
                self.calls.agreement.wait()  # one rank may find a NaN alone
            self._refuse_nan(model, made, batch, tensors, state)
        return made

    def finish(self, left: UnderWay) -> None:
        """Complete a step. All ranks call it."""
        assert left.runs.end is not None
        made = {rank: self._rank_run(left.runs, rank, left.tensors) for rank in self.carrier.ranks}
        self._run(left.micro, left.runs, left.runs.end, made, left.tensors, left)

    def _run(self, micro: CapturedMicro, runs: StepRuns, table: Timetable, made: Mapping[int, RankRun], full: Tensors,
             before: UnderWay | None) -> UnderWay | None:  # fmt: skip
        if before is not None:
            if runs.is_staged:
                self.calls.agreement.wait()  # the first line ends the update before, and writes
            before.taken = True
            for rank, run in made.items():
                run.boxes["started", None] = dict(before.started[rank])
        self._lines(runs, table, made, full)
        if runs.end is None or table is runs.end:
            return None
        started = {rank: run.boxes["started", None] for rank, run in made.items()}
        self.carrier.settle(started)
        numbers = {rank: self._program(runs.programs["turn", None], rank).finished for rank in made}
        left = {rank: {**own, **{name: full[name] for name in numbers[rank]}} for rank, own in started.items()}
        return UnderWay(micro, runs, left, full)

    def _lines(self, runs: StepRuns, table: Timetable, made: Mapping[int, RankRun], full: Tensors) -> None:
        """Run the lines of a timetable, and write what they have changed back to full tensors."""
        carrier = self.carrier
        messages = {rank: recorded(carrier.messages(rank), rank) for rank in made} if runs.is_staged else {}
        for rank, run in made.items() if runs.is_staged else ():
            run.during = _in_slots(messages[rank])
        slots = {rank: runs.slots(rank, messages[rank]) for rank in messages} if runs.slots is not None else {}
        try:
            carrier.run({rank: run.run(table.of(rank), slots.get(rank)) for rank, run in made.items()})
        except BaseException as error:
            self._fail(error, runs)
            raise
        held = {rank: run.held for rank, run in made.items()}
        carrier.write(full, held, runs.known, runs.written)

    # -- the ranks -------------------------------------------------------------------------------------------------

    def _rank_runs(self, runs: StepRuns, batch: Sequence[CallInputs], computed: Sequence[Tensors], tensors: Tensors,
                   state: Mapping[str, torch.Tensor]) -> dict[int, RankRun]:  # fmt: skip
        """Return each rank with its pieces of the model, the state and the batch."""
        made = {}
        for rank in self.carrier.ranks:
            run = made[rank] = self._rank_run(runs, rank, {**tensors, **state})
            of_all = [None] if None in runs.input_types else []
            for stage in dict.fromkeys((*runs.stages_of(rank), *of_all)):
                types = runs.input_types[stage]
                pieces = [self._inputs(runs, types, inputs, rank) for inputs in batch]
                run.inputs[stage] = [{**own, **numbers} for own, numbers in zip(pieces, computed, strict=True)]
            if (None in run.inputs and ("first", None) in runs.programs) or ("turn", None) in runs.programs:
                run.batches = {
                    batch_input_name(name, k): tensor for k, own in enumerate(pieces) for name, tensor in own.items()
                }
        return made

    def _rank_run(self, runs: StepRuns, rank: int, tensors: Mapping[str, torch.Tensor]) -> RankRun:
        programs = {key: self._program(placed, rank) for key, placed in runs.programs.items() if rank in placed.mesh}
        held = self.carrier.held(tensors, runs.held_on(rank), runs.known, rank)
        count = runs.timetable.batches
        return RankRun(programs, held, {}, self.carrier.device, lambda entry: _in_span(entry, count))

    @staticmethod
    def _inputs(runs: StepRuns, types: Mapping[str, TensorType], inputs: CallInputs, rank: int) -> Tensors:
        """Return a rank's pieces of the inputs that a stage reads, by their names in the programs."""
        named = zip(runs.inputs, inputs.named, strict=True)
        return {
            name: piece_of(tensor, given, types[name], rank, inputs) for name, (given, tensor) in named if name in types
        }

    def _program(self, placed: PlacedProgram, rank: int) -> RankProgram:
        key = id(placed.program), placed.stage, rank
        if key not in self._programs:
            self._programs[key] = placed.program, RankProgram(self.carrier.functions(placed, rank))
        return self._programs[key][1]

    def forget(self, program: Program) -> None:
        """Drop a program that does not run again."""
        for key in [key for key, (own, _) in self._programs.items() if own is program]:
            del self._programs[key]

    def clear(self) -> None:
        """Drop all programs."""
        self._programs.clear()

    # -- errors ----------------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException, runs: StepRuns) -> None:
        """Keep where a step on stages has failed on this rank, and raise its error with that."""
        if not runs.is_staged or not isinstance(self.carrier, ProcessCarrier):
            return
        if is_refused_by_all(error):
            return
        self._failed = at(where_raised(error))
        if isinstance(error, Exception):
            told = with_place(error, self.carrier.rank)
            if told is not error:
                raise told from error

    def refuse_after_failure(self) -> None:
        """Refuse to run on after a step that failed: its messages would meet those of the next."""
        if self._failed:
            raise RuntimeError(
                f"a step failed on this rank {self._failed}, and its messages are still under way: end the job, and "
                f"start again from a checkpoint"
            )

    def _refuse_nan(self, model: ModelState, made: Mapping[int, RankRun], batch: Sequence[CallInputs],
                    tensors: Tensors, state: Mapping[str, torch.Tensor]) -> None:  # fmt: skip
        """Refuse NaN that comes in: in the full tensors of simulated ranks, or in the pieces of this one."""
        if isinstance(self.carrier, SimulatedCarrier):
            brought = [dict(inputs.named) for inputs in batch]
            anomaly.refuse_nan(model, {name: tensor.detach() for name, tensor in tensors.items()}, brought, state)
            return
        for rank, run in made.items():
            held = {name: run.held[name] for name in tensors if name in run.held}
            for pieces in run.inputs.values():
                anomaly.refuse_nan(model, held, pieces, state, rank)

    # -- what is returned ------------------------------------------------------------------------------------------

    def _joined(self, runs: StepRuns, outputs: Sequence[Output], made: Mapping[int, RankRun],
                batch: Sequence[CallInputs]) -> list[torch.Tensor]:  # fmt: skip
        """Return the outputs of the batch, of those of all micro-batches. All ranks call it."""
        labels = [output_name(k) for k in range(len(outputs))]
        counts = range(len(batch))
        if isinstance(self.carrier, SimulatedCarrier):
            types = {rank: runs.outputs(rank) for rank in made}
            return [
                join_whole(
                    output,
                    [
                        whole_of_all(output.name, {rank: (run.outputs[None, batch][labels[k]], types[rank][k])
                                                   for rank, run in made.items()})
                        for batch in counts
                    ],
                )
                for k, output in enumerate(outputs)
            ]  # fmt: skip
        ((rank, run),) = made.items()
        brought = brought_pieces(batch[0], self.calls.mesh)
        return [
            join_pieces(output, [run.outputs[None, k][label] for k in counts], type, self.calls.tensors, brought)
            for output, label, type in zip(outputs, labels, runs.outputs(rank), strict=True)
        ]


def whole_of_all(name: str, pieces: Mapping[int, tuple[torch.Tensor, TensorType]]) -> torch.Tensor:
    """Return a full tensor of pieces of simulated ranks. The ranks of each mesh among them have all of it.

    Raises:
        SimulationError: two meshes have other values.
    """
    types = {type.mesh: type for _, type in pieces.values()}
    first, *others = (join({rank: pieces[rank][0] for rank in mesh.ranks}, type, name) for mesh, type in types.items())
    if not all(torch.equal(other.nan_to_num(), first.nan_to_num()) for other in others):
        raise SimulationError(f"the ranks of all stages have the output {name}, and their values differ")
    return first


def brought_pieces(inputs: CallInputs, mesh: Mesh) -> int:
    """Return the number of different pieces of the batch that the ranks bring; 0 if all ranks have the same batch."""
    counts = [mesh.count(inputs.layouts[name].dims[0][0][1]) for name in inputs.shapes if inputs.layouts[name].dims]
    return max(counts, default=0)


def _in_span(entry: Entry, count: int) -> tuple[Where, AbstractContextManager[object]]:
    """Return what errors call a line, and the span of it."""
    words = WORDS.get(entry.what) or ("" if entry.batch is None else nth(entry.batch + 1, count))
    return words, span(words)


def _in_slots(messages: Messages) -> Callable[[Entry], tuple[Where, AbstractContextManager[object]]]:
    """Return the same for a rank of a step with stages, whose lines are blocks of their own, as slots are."""

    def during(entry: Entry) -> tuple[Where, AbstractContextManager[object]]:
        of_stage = "" if entry.stage is None else f" of stage {entry.stage}"
        return "", messages.during(f"{OF_STAGES.get(entry.what, entry.program)}{of_stage}")

    return during


def carrier_here(calls: Calls, offload: bool) -> ProcessCarrier:
    """Return what carries this process's rank."""
    context, job = calls.context(), calls.job
    groups, device = ({}, torch.device("cpu")) if job is None else (job.groups, job.device)
    gate = None if context.agreement is None else context.agreement.finish
    return ProcessCarrier(context.rank, device, groups, context.groups_for, gate, context.regions, offload)
