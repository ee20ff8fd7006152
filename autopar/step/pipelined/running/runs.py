"""Run pipelined steps: on this rank of real processes, or on all ranks in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.capture.model_state import ModelState
from autopar.errors import SimulationError
from autopar.ir.mesh import PIPELINE
from autopar.ir.nodes import name_of, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.streams import DEFAULT, group_key
from autopar.ir.value_names import SCALE, sums_in
from autopar.model.calls import Calls
from autopar.model.dtensor_parameters import local_of
from autopar.model.inputs import CallInputs, piece_of
from autopar.runtime import anomaly
from autopar.runtime.current_op import where_raised
from autopar.runtime.modes import as_captured
from autopar.runtime.processes.watch.caught import with_place
from autopar.runtime.processes.watch.wording import at
from autopar.runtime.seeds import seeds_of_calls
from autopar.runtime.simulation.pieces import cut, join
from autopar.runtime.simulation.simulate import run_together
from autopar.step.compiling.compiled_step import Placed
from autopar.step.pipelined.placing.programs import CutStage, PipelinedMicro, Stage
from autopar.step.pipelined.placing.update import PipelinedUpdate
from autopar.step.pipelined.running.functions import Functions, ProcessFunctions, SimulatedFunctions
from autopar.step.pipelined.running.messages import Mail, Pool, ProcessMessages, SimulatedMessages, connect
from autopar.step.pipelined.running.outputs import join_here, join_simulated
from autopar.step.pipelined.running.rank import RankStep
from autopar.step.pipelined.running.recorded import recorded
from autopar.step.pipelined.running.stage_state import Tensors
from autopar.step.runs import Returned, brought_pieces


def computed_of(calls: Calls, micro: PipelinedMicro, count: int) -> list[Tensors]:
    """Return the numbers and the seed of each micro-batch, by the names of their placeholders.

    The seeds are drawn at once and in the order of the micro-batches, so that the schedule changes no draw.
    """
    captured = micro.captured
    numbers = {number.name: number.tensor(captured.device) for number in captured.numbers}
    control = None if calls.job is None else calls.job.control
    seeds = seeds_of_calls(count, captured.draws, calls.compiler.random, captured.device, control)
    return [{**numbers, **({"seed": seeds[k]} if seeds else {})} for k in range(count)]


def types_of_held(micro: PipelinedMicro, update: PipelinedUpdate, stage: Stage) -> dict[str, TensorType]:
    """Return the types of what a stage keeps: its parameters and buffers, and the optimizer's state; by name."""
    types: dict[str, TensorType] = {}
    programs = [stage.program]
    ending = update.stages[stage.number].placed
    programs += [ending[0]] if ending is not None else []
    programs += [stage.micro.copy[0]] if stage.micro.copy is not None else []
    for program in programs:
        sums = sums_in(program)
        for node in program.placeholders:
            record, name = record_of(node), name_of(node)
            if record.role in ("param", "buffer", "state") and name not in sums:
                types[name] = tensor_type(node)
    types |= {name: micro.parameters[name] for name in types if name in micro.parameters}
    return types


@dataclass
class PipelinedOnProcess:
    """Runs pipelined steps on this rank.

    Attributes:
        calls: the calls of the model.
    """

    calls: Calls
    _steps: dict[tuple[int, int], RankStep] = field(default_factory=dict)
    _failed: str = ""  # where a step has failed

    def __call__(self, batch: Sequence[CallInputs], model: ModelState, micro: PipelinedMicro, update: PipelinedUpdate,
                 state: Mapping[str, torch.Tensor]) -> Returned:  # fmt: skip
        """Run the step of a batch; arguments and results are as those of ``step.runs.OnProcess``."""
        calls = self.calls
        context = calls.context()
        step = self._step(micro, update)
        messages = step.messages
        held: Tensors = {}
        for name, tensor in (*model.parameters, *model.buffers):
            held[name] = local_of(tensor)
        calls.agreement.wait()  # before any other message
        computed = computed_of(calls, micro, len(batch))
        inputs = {stage.number: inputs_of(stage, batch, computed, context.rank) for stage in step.stages}
        if anomaly.is_on():
            for stage in step.stages:
                anomaly.refuse_nan(model, held, inputs[stage.number], state, context.rank)
        held |= state
        try:
            step.messages = recorded(messages, context.rank)
            with as_captured():
                returned, stacked = result_of(step.run(held, inputs))
        except BaseException as error:
            self._failed = at(where_raised(error))
            if not isinstance(error, Exception):
                raise
            told = with_place(error, context.rank)
            if told is error:
                raise
            raise told from error
        finally:
            step.messages = messages
        outputs = join_here(micro, stacked, context.rank, calls.tensors, brought_pieces(batch[0], calls.mesh))
        return [returned[name] for name in update.returns], outputs

    def refuse_after_failure(self) -> None:
        """Refuse to run on after a step that failed: its messages would meet those of the next."""
        if self._failed:
            raise RuntimeError(
                f"a step failed on this rank {self._failed}, and its messages are still under way: end the job, and "
                f"start again from a checkpoint"
            )

    def _step(self, micro: PipelinedMicro, update: PipelinedUpdate) -> RankStep:
        key = id(micro), id(update)
        if key not in self._steps:
            calls = self.calls
            self._steps[key] = RankStep(
                calls.mesh, calls.context().rank, micro, update, functions_on_process(calls), messages_on_process(calls)
            )
        return self._steps[key]

    def forget(self, program: Program) -> None:
        """Drop the steps with a program that does not run again."""
        self._steps = {key: step for key, step in self._steps.items() if not _has(step, program)}

    def clear(self) -> None:
        """Drop all steps."""
        self._steps.clear()


@dataclass
class PipelinedSimulated:
    """Runs pipelined steps of all ranks in this process, on full tensors.

    Attributes:
        calls: the calls of the model.
    """

    calls: Calls
    _steps: dict[tuple[int, int], dict[int, RankStep]] = field(default_factory=dict)

    def __call__(self, batch: Sequence[CallInputs], model: ModelState, micro: PipelinedMicro, update: PipelinedUpdate,
                 state: Mapping[str, torch.Tensor]) -> Returned:  # fmt: skip
        mail: Mail = {}
        steps = self._of(micro, update, mail)
        full: Tensors = {name: tensor.detach() for name, tensor in (*model.parameters, *model.buffers)}
        computed = computed_of(self.calls, micro, len(batch))
        if anomaly.is_on():
            names = {name for stage in micro.stages for name in stage.input_types}
            brought = [{name: t for name, t in inputs.named if name in names} for inputs in batch]
            anomaly.refuse_nan(model, full, brought, state)
        full |= state
        held: dict[int, Tensors] = {}
        layouts: dict[str, TensorType] = {}
        returned: dict[int, Tensors] = {}
        pieces: dict[int, list[torch.Tensor]] = {}

        def run(rank: int, step: RankStep, inputs: Mapping[int, Sequence[Tensors]]) -> Any:
            returned[rank], pieces[rank] = yield from step.run(held[rank], inputs)

        runs = {}
        for rank, step in steps.items():
            held[rank] = {}
            for stage in step.stages:
                for name, type in types_of_held(micro, update, stage).items():
                    home = self._home(micro, name, stage, type)
                    if name in full and home is not None:
                        held[rank][name] = cut(full[name].detach(), home, home.mesh.coordinates(rank)).clone()
                        layouts[name] = home
            held[rank] |= {name: tensor for name, tensor in full.items() if name not in held[rank] and not tensor.dim()}
            inputs = {stage.number: inputs_of(stage, batch, computed, rank) for stage in step.stages}
            runs[rank] = run(rank, step, inputs)
        with as_captured():
            run_together(runs)
        if left := [key for key, box in mail.items() if box]:
            raise SimulationError(f"rank {left[0][1]} never receives what rank {left[0][0]} has sent to it")
        self._write(full, held, layouts)
        first = returned[self.calls.mesh.ranks[0]]
        for rank, values in returned.items():
            for name, value in values.items():
                if not torch.equal(value, first[name]) and not (value.isnan().all() and first[name].isnan().all()):
                    raise SimulationError(f"rank {rank} has the {name} {value}, and the first rank {first[name]}")
        return [first[name] for name in update.returns], join_simulated(micro, pieces)

    @staticmethod
    def _home(micro: PipelinedMicro, name: str, stage: Stage, type: TensorType) -> TensorType | None:
        """Return the type of a value between steps; ``None`` if another stage keeps it."""
        if name in micro.homes and micro.homes[name] != stage.number:
            return None
        layout = micro.layouts.get(name)
        return type if layout is None else TensorType(type.shape, type.dtype, layout)

    def _write(self, full: Tensors, held: Mapping[int, Tensors], layouts: Mapping[str, TensorType]) -> None:
        """Join the pieces of all values, and copy them to the full tensors."""
        for name, type in layouts.items():
            pieces = {rank: values[name] for rank, values in held.items() if rank in type.mesh and name in values}
            full[name].copy_(join(pieces, type, name))
        first = next(iter(held.values()))
        for name, tensor in full.items():
            if name not in layouts and name in first:
                tensor.copy_(first[name])

    def _of(self, micro: PipelinedMicro, update: PipelinedUpdate, mail: Mail) -> dict[int, RankStep]:
        key = id(micro), id(update)
        if key not in self._steps:
            self._steps[key] = {}
            for rank in self.calls.mesh.ranks:

                def functions(placed: Placed, donated: Sequence[str], rank: int = rank) -> Functions:
                    names = {name_of(node) for node in placed[0].placeholders}
                    return SimulatedFunctions(placed[1][rank], rank, SCALE in names)

                messages = SimulatedMessages(rank, mail)
                self._steps[key][rank] = RankStep(self.calls.mesh, rank, micro, update, functions, messages)
        for rank, step in self._steps[key].items():
            step.messages = recorded(SimulatedMessages(rank, mail), rank)
        return self._steps[key]

    def forget(self, program: Program) -> None:
        """Drop the steps with a program that does not run again."""
        self._steps = {
            key: steps for key, steps in self._steps.items() if not any(_has(step, program) for step in steps.values())
        }

    def clear(self) -> None:
        """Drop all steps."""
        self._steps.clear()


def inputs_of(stage: CutStage, batch: Sequence[CallInputs], computed: Sequence[Tensors], rank: int) -> list[Tensors]:
    """Return a rank's pieces of the inputs of each micro-batch that a stage reads, by the user's names."""
    types = stage.input_types
    return [
        {**numbers, **{name: piece_of(t, name, types[name], rank, inputs) for name, t in inputs.named if name in types}}
        for inputs, numbers in zip(batch, computed, strict=True)
    ]


def _has(step: RankStep, program: Program) -> bool:
    return any(stage.program is program for stage in step.micro.stages)


def functions_on_process(calls: Calls) -> Callable[..., Functions]:
    """Return what makes the functions of a placed program on this rank, given what it may overwrite."""
    context, job = calls.context(), calls.job
    device = torch.device("cpu") if job is None else job.device
    groups = {} if job is None else job.groups

    def functions(placed: Placed, donated: Sequence[str] = ()) -> Functions:
        program, local = placed
        names = {node.name: name_of(node) for node in program.placeholders}
        sums = [of for of in donated if names[of] in sums_in(program)]
        return ProcessFunctions(
            program, local[context.rank], groups, device, donated, sums, SCALE in names.values(), context.regions
        )

    return functions


def messages_on_process(calls: Calls) -> ProcessMessages:
    """Return where this rank sends and receives."""
    rank, job = calls.context().rank, calls.job
    device = torch.device("cpu") if job is None else job.device
    ranks = calls.mesh.group(rank, PIPELINE)
    group = "" if job is None else job.groups.get(group_key(ranks, DEFAULT), "")
    connect(device)
    return ProcessMessages(device, group, Pool(device))


def result_of(run: Any) -> Any:
    """Run a generator that never stops, and return its result."""
    try:
        next(run)
    except StopIteration as end:
        return end.value
    raise AssertionError("a real rank waits inside of its calls")
