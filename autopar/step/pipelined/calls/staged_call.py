"""Capture a call of a model whose parameters are on stages, and cut it by the homes of its parameters.

Each op runs on the last of the stages that keep its parameters or make its operands, so the call needs no cut of its
own. Where there are gradients, each op of the backward runs on the stage of its forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.cache.codec import Codec
from autopar.cache.described import described_options
from autopar.cache.records import given
from autopar.capture import Captured
from autopar.gc_pause import gc_paused
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import is_getitem, name_of, operands, record_of
from autopar.ir.program import Program
from autopar.model.compiled import Compiler
from autopar.model.inputs import CallInputs
from autopar.model.kept_calls import codec_of_captured, facts_of_call
from autopar.model.stage_homes import StageHomes
from autopar.passes import OnStages
from autopar.report.passes import PassReport
from autopar.report.progress import doing
from autopar.runtime.localize import LocalPrograms
from autopar.step.compiling.compiled_step import Placed
from autopar.step.compiling.graph_builder import type_of
from autopar.step.compiling.outputs import Output
from autopar.step.pipelined.calls.gradient_sums import with_sums
from autopar.step.pipelined.cutting.assignment import (
    Assignment,
    computed_anywhere,
    of_last_operand,
    stages_of_written_buffers,
)
from autopar.step.pipelined.cutting.stage_programs import StageProgram, cut_program
from autopar.step.pipelined.placing.copies import traced_copies, traced_home
from autopar.step.pipelined.placing.joined import join
from autopar.step.pipelined.placing.on_stages import place_around
from autopar.step.pipelined.placing.programs import CutStage, place_stages
from autopar.step.pipelined.placing.share import StageOutput, outputs_of_stages, traced_share


@dataclass(frozen=True)
class StagedCall:
    """A captured call, cut into the stages of a pipeline.

    Attributes:
        captured: the call.
        stages: its stages.
        program: the programs of all stages, joined, in which the messages between stages are lines.
        local: that of each rank.
        around: the programs of all stages around the passes: ``copy`` and ``share``, as of ``PipelinedMicro``.
            ``home`` adds gradients of tied parameters on their homes, ``gradients`` brings those of inputs to all.
        homes: where the parameters are.
        made: what it returns; behind it the gradients of inputs.
        inputs: the names of the inputs, in the order in which a call passes them.
        positions: the outputs that have tangents; none in a call without gradients.
        gradients: the parameters that get a gradient, and the stages on which it adds up.
        of_inputs: the inputs that get a gradient.
        whole: whether each rank gets all of each output.
        reports: of its capture.
    """

    captured: Captured
    stages: tuple[CutStage, ...]
    program: Program
    local: LocalPrograms
    around: Mapping[str, Placed]
    homes: StageHomes
    made: tuple[StageOutput, ...]
    inputs: tuple[str, ...]
    positions: frozenset[int]
    gradients: Mapping[str, tuple[int, ...]]
    of_inputs: tuple[str, ...]
    whole: bool = False
    reports: tuple[PassReport, ...] = ()

    @property
    def explicit(self) -> list[Program]:
        """The explicit programs."""
        return [self.program, *(program for program, _ in self.around.values())]

    @property
    def text(self) -> str:
        """The programs, as text that ranks compare."""
        return "\n".join(map(str, self.explicit))

    @property
    def outputs(self) -> tuple[Output, ...]:
        """How its outputs are joined: there is one micro-batch."""
        return tuple(Output(output.name, "same") for output in self.returned)

    @property
    def returned(self) -> tuple[StageOutput, ...]:
        """What the model returns."""
        return self.made[: len(self.made) - len(self.of_inputs)]


@doing("parallelize")
@gc_paused()
def compile_staged(
    compiler: Compiler, inputs: CallInputs, homes: StageHomes, notes: Sequence[str],
    positions: frozenset[int] | None = None,
) -> StagedCall:  # fmt: skip
    """Capture a call, and cut it by the homes of its parameters.

    Args:
        positions: the outputs that have tangents; by default the scalars (a loss), or all if there are none.

    Raises:
        PlanError: several stages read a buffer that the forward writes.
    """
    attrs = {name: layout.attr for name, layout in homes.layouts.items()}
    whole, compiler = (
        compiler.whole,
        replace(compiler, mesh=homes.meshes[0], homes={**compiler.homes, **attrs}, whole=False),
    )
    captured, constraints, report = compiler.capture(inputs, notes)
    if positions is None:
        positions = expected_tangents(captured.program)
    summed = with_sums(captured.program, positions, captured.device)
    assignment = assigned_by_homes(summed.program, homes)
    stages_of_written_buffers(summed.program, assignment)
    parts = cut_program(summed.program, assignment, captured.device)
    constraints = {
        **constraints,
        **{node.name: DistAttr.replicated(len(type_of(node).shape)) for node in summed.tangents},
        **{name: attrs[parameter] for name, parameter in summed.sums.items()},
    }

    def place(number: int, mesh: Mesh, part: StageProgram, attrs: dict[str, DistAttr]) -> CutStage:
        replace(compiler, mesh=mesh).through_passes(part.program, attrs, captured.device)
        return CutStage(number, mesh, part, part.program)

    stages = place_stages(homes.meshes, parts, constraints, place)
    readers = {
        name: tuple(k for k, part in enumerate(parts) if name in part.gradients) for name in summed.sums.values()
    }
    gradients = {name: at for name, at in readers.items() if at}
    program, local, _ = join(replace(compiler, mesh=homes.mesh), stages)
    on, device = OnStages(homes.mesh, program.stages, {}), captured.device
    names, made = tuple(inputs.arguments.names), outputs_of_stages(stages)
    count = len(made) - len(summed.inputs)
    traced = {
        "copy": traced_copies(stages, homes, device),
        "share": traced_share(stages, dict(enumerate(made[:count])), 1, device),
        "home": traced_home(stages, homes, gradients, device),
        "gradients": traced_share([], dict(enumerate(made[count:], count)), 1, device),
    }  # fmt: skip
    around, _ = place_around(replace(compiler, whole=whole), traced, on, homes.meshes[0], device)
    return StagedCall(captured, tuple(stages), program, local, around, homes, made, names, positions, gradients,
                      summed.inputs, whole, (report,))  # fmt: skip


def expected_tangents(program: Program) -> frozenset[int]:
    """Return the outputs that have tangents if nothing else is known: the scalars, or all where there are none."""
    tangents = {
        record.index: type_of(node).shape
        for node in program.placeholders
        if (record := record_of(node)).role == "tangent" and record.index is not None
    }
    return frozenset(k for k, shape in tangents.items() if not shape) or frozenset(tangents)


def codec_of_staged(
    compiler: Compiler, inputs: CallInputs, homes: StageHomes, notes: Sequence[str],
    positions: frozenset[int] | None = None,
) -> Codec[StagedCall]:  # fmt: skip
    """Return how such a call is kept for other processes."""

    def facts() -> dict[str, object]:
        at = {"meshes": homes.meshes, "stages": dict(homes.stage), "layouts": dict(homes.layouts)}
        return {
            **facts_of_call(compiler, inputs, notes),
            "homes": described_options(at),
            "tangents": described_options(positions),
        }

    return codec_of_captured("call on stages", StagedCall, compiler, inputs, facts, {StageHomes: given(homes)})


def assigned_by_homes(program: Program, homes: StageHomes) -> Assignment:
    """Assign each op of a forward to the last of the stages of its operands and its parameters. Linear in the graph.

    An op of the backward runs where its forward runs, as ``assign`` says it.

    An op that reads only buffers which the forward writes, as the running statistics of a batch norm, goes to the first
    stage that reads it: there they are written, too.
    """
    anywhere = computed_anywhere(program)
    home: dict[fx.Node, int] = {}  # parameters, and what is computed of one parameter on any stage
    stage: dict[fx.Node, int] = {}
    of_buffers: dict[fx.Node, None] = {}  # ordered
    forward = [node for node in program.nodes if record_of(node).phase in ("", "forward")]
    for node in forward:
        if node.op == "placeholder" and record_of(node).role == "param":
            home[node] = homes.stage.get(name_of(node), 0)
        elif node in anywhere:
            read = [home[value] for value in operands(node) if value in home]
            home |= dict.fromkeys([node] * bool(read), max(read, default=0))
        elif node.op == "call_function":
            read = [known for value in operands(node) if (known := stage.get(value, home.get(value))) is not None]
            if read:
                stage[node] = max(read)
            elif any(record_of(value).role == "state" or value in of_buffers for value in operands(node)):
                of_buffers[node] = None
            else:
                stage[node] = 0
    for node in reversed(of_buffers):
        stage[node] = min((stage[user] for user in node.users if user in stage), default=0)
    calls: dict[object, int] = {}
    for node in stage:
        call = record_of(node).call
        calls[call] = max(stage[node], calls.get(call, 0))
    for node in program.nodes:
        if node.op == "call_function" and node not in anywhere and record_of(node).phase == "backward":
            call = record_of(node).call
            follows = call is None or call not in calls or is_getitem(node)
            stage[node] = of_last_operand(node, stage, False) if follows else calls[call]
    return Assignment(len(homes.meshes), stage, anywhere)
