"""Compile the stages of a pipelined micro-batch: cut the traced program, and place each stage on its ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopar.capture import Captured
from autopar.errors import PlanError
from autopar.gc_pause import gc_paused
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh, stage_name
from autopar.ir.nodes import name_of, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.model.compiled import Compiler
from autopar.pipeline import PipelineSchedule
from autopar.plan.recompute import within
from autopar.report.passes import PassReport
from autopar.report.progress import doing
from autopar.scheduling.programs.order import OF_STAGES
from autopar.search.devices.stages import Pipelined
from autopar.step.batches.counts import count_parts
from autopar.step.batches.terms import Terms
from autopar.step.compiling.compile import MicroCompiler
from autopar.step.compiling.compiled_step import about
from autopar.step.compiling.micro import Micro
from autopar.step.compiling.request import MicroRequest
from autopar.step.options import StepOptions
from autopar.step.pipelined.cutting.assignment import (
    Assignment,
    assign,
    computed_anywhere,
    ops_of_forward,
    stages_of_written_buffers,
)
from autopar.step.pipelined.cutting.cut import Place, cut_by_blocks, cut_by_cost, cut_by_globs
from autopar.step.pipelined.cutting.stage_programs import StageProgram, cut_program
from autopar.step.pipelined.cutting.units import units_of
from autopar.step.pipelined.placing.copies import traced_copies
from autopar.step.pipelined.placing.joined import join
from autopar.step.pipelined.placing.on_stages import Traced, place_around
from autopar.step.pipelined.placing.programs import PipelinedMicro, Stage, meshes_of, place_stages
from autopar.step.pipelined.placing.share import outputs_of_stages, traced_share
from autopar.step.pipelined.schedules import gathers_apart


@doing("train_step")
def compile_pipelined(
    compiler: Compiler, request: MicroRequest, mesh: Mesh, schedule: PipelineSchedule
) -> PipelinedMicro:
    """Capture the call of one micro-batch, cut it into stages, and place each on its ranks.

    Args:
        mesh: the whole mesh.
        schedule: the schedule, with messages.

    Raises:
        PlanError: the model cannot be cut in this way.
    """
    # the price of a stage is no bound of a step's simulated time, in which transfers are hidden
    compiler = replace(compiler, planner=replace(compiler.planner, below=math.inf))
    meshes, options = meshes_of(mesh, schedule.rank_of), request.options
    captured, attrs, report = replace(compiler, mesh=meshes[0], homes={}).capture(request.call, request.notes)
    whole = MicroCompiler(compiler, request, captured, attrs, [report])
    traced, micro = whole.traced()
    start = time.perf_counter()
    with gc_paused(), doing("cut"):
        assignment = assigned(micro.program, schedule, options, compiler)
        parts = cut_program(micro.program, assignment, captured.device)
    ms = (time.perf_counter() - start) * 1e3
    homes = _homes(micro.program, parts)
    placing = _Placing(compiler, request, captured, schedule, traced, micro, homes)
    stages = place_stages(meshes, parts, whole.attrs, placing.place)
    program, local, joining = join(replace(compiler, mesh=mesh), stages)
    made = PipelinedMicro(
        captured,
        schedule,
        tuple(stages),
        program,
        local,
        {},
        homes,
        (*whole.reports, PassReport("cut", ms), *placing.reports, *joining),
        micro.outputs,
        compiler.whole,
        inputs=tuple(whole.renamed.get(name, name) for name in request.call.arguments.names),
    )
    device = captured.device
    around = {
        **_traced_counts(traced, micro, whole.attrs, made, options.count),
        "copy": traced_copies(made.stages, made.stage_homes, device, placing.copied),
        "share": traced_share(made.stages, dict(enumerate(outputs_of_stages(made.stages))), schedule.batches, device),
    }
    placed, more = place_around(compiler, around, made.on_stages, meshes[0], device)
    return replace(made, around=placed, reports=(*made.reports, *more))


def _traced_counts(
    traced: Program, micro: Micro, attrs: Mapping[str, DistAttr], made: PipelinedMicro, count: int
) -> dict[str, Traced]:
    """Make the traced programs of the counts that losses are divided by; none if there are no counts.

    ``attrs``: the layouts of the inputs, by their nodes in the micro-batch.
    """
    if not micro.terms.counts:
        return {}
    layouts = {name_of(n): attrs[n.name] for n in micro.program.placeholders if n.name in attrs}
    layouts |= {name: layout.attr for name, layout in made.layouts.items()}
    found = {}
    parts = count_parts(traced, micro.terms, count, made.captured.device)
    for program, name in zip(parts, ("sums", "count"), strict=True):
        own = {node.name: name_of(node) for node in program.placeholders}
        stages = {node: stage_name(made.homes[of]) for node, of in own.items() if of in made.homes}
        found[name] = Traced(program, {node: layouts[of] for node, of in own.items() if of in layouts}, stages)
    return found


def assigned(program: Program, schedule: PipelineSchedule, options: StepOptions, compiler: Compiler) -> Assignment:
    """Assign the ops of a traced micro-batch to the stages of a schedule."""
    anywhere = computed_anywhere(program)
    ops, count = ops_of_forward(program, anywhere), schedule.stages
    place: Place
    if options.stages is not None:
        place = cut_by_globs(program, ops, options.stages, count)
    else:
        units = units_of(program, ops, compiler.machine or compiler.planner.machine)
        chosen = options.schedule
        if isinstance(chosen, Pipelined):
            place = cut_by_blocks(units, chosen.cut, chosen.blocks)
        else:
            place = cut_by_cost(units, count, _live(schedule))
    assignment = assign(program, anywhere, place, count)
    _check_every_stage(ops, assignment)
    _check_buffers(program, assignment, schedule)
    return assignment


def _live(schedule: PipelineSchedule) -> list[float]:
    """Return how many micro-batches each stage keeps the activations of."""
    live = [0] * schedule.stages
    most = [0] * schedule.stages
    last = "WW" if schedule.is_split else "BW"
    for _, _, task in schedule.tasks():
        if task.kind == "FW":
            live[task.stage] += 1
            most[task.stage] = max(most[task.stage], live[task.stage])
        elif task.kind == last:
            live[task.stage] -= 1
    return [float(count) for count in most]


def _check_every_stage(ops: Sequence[fx.Node], assignment: Assignment) -> None:
    empty = set(range(assignment.stages)) - {assignment.stage[node] for node in ops}
    if empty:
        raise PlanError(f"stage {min(empty)} has no op of the forward: change stages=, or leave it out")


def _check_buffers(program: Program, assignment: Assignment, schedule: PipelineSchedule) -> None:
    """Refuse a buffer that several stages read or write, or that is written out of order."""
    for node, stage in stages_of_written_buffers(program, assignment).items():
        order = [task.batch for _, _, task in schedule.tasks() if task.kind == "FW" and task.stage == stage]
        if order != sorted(order):
            raise PlanError(
                f"the buffer {name_of(node)} is written in the forward of each micro-batch, and the schedule runs the "
                f"forwards of stage {stage} in the order {', '.join(map(str, order))}: use a schedule that keeps the "
                f"order of the micro-batches"
            )


def _homes(program: Program, parts: Sequence[StageProgram]) -> dict[str, int]:
    """Return the stage that keeps each parameter and buffer: the first that reads it."""
    homes = {name_of(n): 0 for n in program.placeholders if record_of(n).role == "param"}
    for number, part in reversed(list(enumerate(parts))):
        homes |= {name_of(node): number for node in part.program.placeholders if record_of(node).role == "param"}
    return homes


@dataclass
class _Placing:
    """Places the stages of a micro-batch.

    Attributes:
        reports: what each pass did.
        copied: parameter → its type, and that of the copy that its stage takes from the program of all stages.
    """

    compiler: Compiler
    request: MicroRequest
    captured: Captured
    schedule: PipelineSchedule
    traced: Program
    micro: Micro
    homes: Mapping[str, int]
    reports: list[PassReport] = field(default_factory=list)
    copied: dict[str, tuple[TensorType, TensorType]] = field(default_factory=dict)

    def place(self, number: int, mesh: Mesh, part: StageProgram, attrs: dict[str, DistAttr]) -> Stage:
        foreign = {name for name, home in self.homes.items() if home != number}
        updates = {name: how for name, how in self.request.updates.items()
                   if name in part.gradients and name not in foreign}  # fmt: skip
        options = self.request.options
        options = replace(options, recompute=within(part.program, self.micro.program, options.recompute))
        request = replace(self.request, options=options, updates=updates)
        compiler = MicroCompiler(replace(self.compiler, mesh=mesh, whole=False), request, self.captured, attrs, [])
        made = compiler.placed(
            self.traced, Micro(part.program, Terms(), part.gradients), foreign=foreign, execution=OF_STAGES,
            split_backward=self.schedule.is_split, gathers_apart=gathers_apart(self.schedule),
        )  # fmt: skip
        if made.copy is None:
            self.copied |= compiler.copied
        self.reports += about(f"stage {number}", compiler.reports)
        return Stage(number, mesh, part, made.program, made)
