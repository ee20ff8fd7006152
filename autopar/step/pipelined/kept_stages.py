"""Keep the programs of pipelined steps for other processes: those of each stage, and those that end the step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from autopar.cache.placed_rows import placed_of, placed_to_json, reports_of, reports_to_json
from autopar.cache.program_rows import Types
from autopar.capture import Captured
from autopar.capture.guards import Guards
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.model.compiled import RUNS, Compiler
from autopar.model.inputs import CallInputs
from autopar.pipeline import PipelineSchedule
from autopar.runtime.lowering.bundles import Crossed
from autopar.step.kept_steps import (
    Form,
    batch_of,
    batch_to_json,
    outputs_of,
    outputs_to_json,
    step_capture_of,
    step_capture_to_json,
)
from autopar.step.pipelined.cutting.stage_programs import StageProgram
from autopar.step.pipelined.placing.programs import Counting, PipelinedMicro, Stage, Tied
from autopar.step.pipelined.placing.update import PipelinedUpdate, SentHome, StageUpdate

# -- micro-batches -----------------------------------------------------------------------------------------------------


def stages_to_json(micro: PipelinedMicro) -> Any:
    """Return the stages of a micro-batch as JSON. ``NotCached`` if a part of it has no form."""
    types = Types()
    written = {
        "captured": step_capture_to_json(micro.captured),
        "stages": [_stage_to_json(stage, types) for stage in micro.stages],
        "joined": placed_to_json((micro.program, micro.local), types),
        "tied": [_tied_to_json(tied) for tied in micro.tied],
        "homes": list(micro.homes.items()),
        "outputs": outputs_to_json(micro.outputs),
        "inputs": list(micro.inputs),
        "reports": reports_to_json(micro.reports),
    }
    return {**written, "types": types.to_json()}


def stages_of(
    compiler: Compiler, inputs: CallInputs, schedule: PipelineSchedule, content: Any, guards: Guards
) -> PipelinedMicro:
    """Return the stages of a micro-batch. What is malformed raises an error of any kind."""
    types = Types.of(content["types"])
    stages = list[Stage]()

    def captured(program: Program) -> Captured:
        if stages:
            return stages[0].micro.captured
        return step_capture_of(compiler, inputs, content["captured"], program, guards)

    for row in content["stages"]:
        stages.append(_stage_of(row, len(stages), types, captured))
    joined = placed_of(content["joined"], types, RUNS)
    assert joined is not None
    return PipelinedMicro(
        stages[0].micro.captured,
        schedule,
        tuple(stages),
        *joined,
        tuple(map(_tied_of, content["tied"])),
        dict(content["homes"]),
        reports_of(content["reports"]),
        outputs_of(content["outputs"]),
        compiler.whole,
        inputs=tuple(content["inputs"]),
    )


def form_of_stages(compiler: Compiler, inputs: CallInputs, schedule: PipelineSchedule) -> Form[PipelinedMicro]:
    """Return the form in which the stages of a micro-batch are kept."""
    return Form("stages", stages_to_json, partial(stages_of, compiler, inputs, schedule))


def _stage_to_json(stage: Stage, types: Types) -> Any:
    counting = stage.counting
    return {
        "mesh": types.mesh(stage.mesh),
        "cut": cut_to_json(stage.cut),
        "batch": batch_to_json(stage.micro, types),
        "counting": None if counting is None else [placed_to_json(each, types)
                                                   for each in (counting.sums, counting.counts)],
    }  # fmt: skip


def _stage_of(row: Any, number: int, types: Types, captured: Callable[[Program], Captured]) -> Stage:
    batch = batch_of(row["batch"], types, captured)
    cut = cut_of(row["cut"], batch.program)
    counting = None
    if row["counting"] is not None:
        sums, counts = (placed_of(each, types, RUNS) for each in row["counting"])
        assert sums is not None and counts is not None
        counting = Counting(sums, counts)
    return Stage(number, types.meshes[row["mesh"]], cut, batch.program, batch, counting)


def cut_to_json(cut: StageProgram) -> Any:
    """Return what a cut says of the program of a stage as JSON, without the program."""
    return [list(cut.up.items()), list(cut.down.items()), list(cut.from_before.items()), list(cut.from_behind.items()),
            list(cut.gradients), cut.has_loss, list(cut.outputs.items())]  # fmt: skip


def cut_of(row: Any, program: Program) -> StageProgram:
    """Return the program of a stage, with what the cut says of it. ``program``: the explicit one."""
    up, down, from_before, from_behind, gradients, has_loss, outputs = row
    return StageProgram(program, dict(up), dict(down), dict(from_before), dict(from_behind), tuple(gradients), has_loss,
                        dict(outputs))  # fmt: skip


def _tied_to_json(tied: Tied) -> Any:
    return [tied.name, tied.home, list(tied.readers)]


def _tied_of(row: Any) -> Tied:
    name, home, readers = row
    return Tied(name, home, tuple(readers))


# -- updates -----------------------------------------------------------------------------------------------------------


def endings_to_json(update: PipelinedUpdate) -> Any:
    """Return the programs that end a pipelined step as JSON. ``NotCached`` if a part of it has no form."""
    types = Types()
    written = {
        "stages": [[placed_to_json(each.placed, types), list(each.returns), sorted(each.states)]
                   for each in update.stages],
        "homeward": [
            [_tied_to_json(sent.tied), sent.reader, sent.number, placed_to_json(sent.placed, types), sent.value.name,
             *(types.number(type) for type in _ends_of(sent.value))]
            for sent in update.homeward
        ],
        "returns": list(update.returns),
        "reports": reports_to_json(update.reports),
    }  # fmt: skip
    return {**written, "types": types.to_json()}


def endings_of(content: Any) -> PipelinedUpdate:
    """Return the programs that end a pipelined step. What is malformed raises an error of any kind."""
    types = Types.of(content["types"])
    homeward = []
    for tied, reader, number, row, name, source, target in content["homeward"]:
        placed = placed_of(row, types, RUNS)
        assert placed is not None
        value = Crossed.of(name, types.at(source), types.at(target))
        homeward.append(SentHome(_tied_of(tied), reader, number, placed, value))
    return PipelinedUpdate(
        tuple(StageUpdate(placed_of(row, types, RUNS), tuple(returns), frozenset(states))
              for row, returns, states in content["stages"]),
        tuple(homeward),
        tuple(content["returns"]),
        reports_of(content["reports"]),
    )  # fmt: skip


def _ends_of(value: Crossed) -> tuple[TensorType, TensorType]:
    """Return the types of a value where it is made and where it goes."""
    source, target = (TensorType(value.ends.shape, value.dtype, end) for end in (value.ends.source, value.ends.target))
    return source, target


ENDINGS = Form("update of stages", endings_to_json, endings_of)
