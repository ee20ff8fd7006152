"""Keep the calls of a model on stages for other processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.cache.cache import Codec
from autopar.cache.described import described_options
from autopar.cache.placed_rows import placed_of, placed_to_json
from autopar.cache.program_rows import Types, program_of, rows_of
from autopar.capture.guards import Guards
from autopar.model.compiled import RUNS, Compiler
from autopar.model.inputs import CallInputs
from autopar.model.kept_calls import call_to_json, captured_here
from autopar.model.kept_facts import facts_of_call
from autopar.model.stage_homes import StageHomes
from autopar.step.pipelined.calls.staged_call import StagedCall, compile_staged
from autopar.step.pipelined.kept_stages import cut_of, cut_to_json
from autopar.step.pipelined.placing.outputs import outputs_of_stages
from autopar.step.pipelined.placing.programs import CutStage


def staged_by_cache(compiler: Compiler, inputs: CallInputs, homes: StageHomes, notes: Sequence[str]) -> StagedCall:
    """Capture a call and cut it, or take what another process has made of it. All ranks call it."""
    if compiler.cache is None:
        return compile_staged(compiler, inputs, homes, notes)
    made, *_ = compiler.cache.through(_codec(compiler, inputs, homes, notes), compiler.planner.agreement)
    compiler.sizes.share()
    return made


def _codec(compiler: Compiler, inputs: CallInputs, homes: StageHomes, notes: Sequence[str]) -> Codec[StagedCall]:
    def facts() -> dict[str, Any]:
        at = {"meshes": homes.meshes, "stages": dict(homes.stage), "layouts": dict(homes.layouts)}
        return {**facts_of_call(compiler, inputs, notes), "homes": described_options(at)}

    def read(content: Any, guards: Guards) -> StagedCall:
        types = Types.of(content["types"])
        stages = tuple(_stage_of(row, number, types) for number, row in enumerate(content["stages"]))
        captured = captured_here(compiler, inputs, content["captured"], stages[0].program, guards)
        joined = placed_of(content["joined"], types, RUNS)
        assert joined is not None
        names = tuple(inputs.arguments.names)
        return StagedCall(captured, stages, *joined, homes, outputs_of_stages(stages), names, compiler.whole)

    return Codec(
        kind="call on stages",
        model=compiler.model,
        facts=facts,
        make=lambda ranks, check: compile_staged(compiler.planned_by(ranks, check), inputs, homes, notes),
        guards=lambda call: call.captured.guards,
        write=_to_json,
        read=read,
    )


def _to_json(call: StagedCall) -> Any:
    types = Types()
    written = {
        "captured": call_to_json(call.captured),
        "joined": placed_to_json((call.program, call.local), types),
        "stages": [
            [types.mesh(stage.mesh), cut_to_json(stage.cut), rows_of(stage.program, types)] for stage in call.stages
        ],
    }
    return {**written, "types": types.to_json()}


def _stage_of(row: Any, number: int, types: Types) -> CutStage:
    mesh, cut, written = row
    program = program_of(written, types)
    return CutStage(number, types.meshes[mesh], cut_of(cut, program), program)
