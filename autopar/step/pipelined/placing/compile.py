"""Compile the stages of a pipelined micro-batch: cut the traced program, and place each stage on its ranks."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.capture import Captured
from autopar.errors import PlanError
from autopar.gc_pause import gc_paused
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import name_of, record_of
from autopar.ir.program import Program
from autopar.ir.value_names import count_name
from autopar.model.compiled import Compiler
from autopar.model.inputs import CallInputs
from autopar.pipeline import PipelineSchedule
from autopar.plan.recompute import within
from autopar.report.passes import PassReport
from autopar.report.progress import doing
from autopar.scheduling.programs.order import OF_STAGES, OF_STEPS
from autopar.search.devices.stages import Pipelined
from autopar.step.batches.counts import count_parts
from autopar.step.batches.terms import Terms
from autopar.step.compiling.compile import MicroCompiler
from autopar.step.compiling.compiled_step import MicroBatch, Placed, about
from autopar.step.compiling.ending import Updating
from autopar.step.compiling.micro import Micro
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
from autopar.step.pipelined.placing.joined import join
from autopar.step.pipelined.placing.programs import Counting, PipelinedMicro, Stage, Tied, meshes_of
from autopar.step.pipelined.schedules import gathers_apart
from autopar.verify.levels import verify


@doing("train_step")
def compile_pipelined(
    compiler: Compiler,
    mesh: Mesh,
    call: CallInputs,
    options: StepOptions,
    schedule: PipelineSchedule,
    trained: Sequence[str],
    updates: Mapping[str, Updating],
    cut: Collection[str],
    notes: Sequence[str] = (),
    *,
    same_numbers: bool = False,
) -> PipelinedMicro:
    """Capture the call of one micro-batch, cut it into stages, and place each on its ranks.

    Args:
        mesh: the whole mesh.
        schedule: the schedule, with messages.

    The other arguments are those of ``compile_micro``.

    Raises:
        PlanError: the model cannot be cut in this way.
    """
    meshes = meshes_of(mesh, schedule.rank_of)
    captured, attrs, report = replace(compiler, mesh=meshes[0], homes={}).capture(call, notes)
    whole = MicroCompiler(compiler, options, trained, updates, captured, attrs, report, same_numbers, call)
    traced, micro = whole.traced(cut)
    start = time.perf_counter()
    with gc_paused(), doing("cut"):
        assignment = assigned(micro.program, schedule, options, compiler)
        parts = cut_program(micro.program, assignment, captured.device)
    ms = (time.perf_counter() - start) * 1e3
    for part in parts:
        verify(part.program, "cut")
    reports = [*whole.reports, PassReport("cut", ms)]
    homes, tied = _homes(micro.program, parts)
    stages = _Stages(compiler, options, trained, updates, captured, whole.attrs, schedule, traced, micro, homes)
    for number, (own, part) in enumerate(zip(meshes, parts, strict=True)):
        stages.place(number, own, part)
    program, local, joining = join(replace(compiler, mesh=mesh), stages.stages)
    return PipelinedMicro(
        captured,
        schedule,
        tuple(stages.stages),
        program,
        local,
        tied,
        homes,
        (*reports, *stages.reports, *joining),
        micro.outputs,
        compiler.whole,
        inputs=tuple(whole.renamed.get(name, name) for name in call.arguments.names),
    )


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


def _homes(program: Program, parts: Sequence[StageProgram]) -> tuple[dict[str, int], tuple[Tied, ...]]:
    """Return the stage that keeps each parameter and buffer: the first that reads it; and the parameters with several
    readers."""
    readers: dict[str, list[int]] = {}
    for number, part in enumerate(parts):
        for node in part.program.placeholders:
            if record_of(node).role == "param":
                readers.setdefault(name_of(node), []).append(number)
    homes = {name_of(n): 0 for n in program.placeholders if record_of(n).role == "param"}
    homes |= {name: stages[0] for name, stages in readers.items()}
    tied = tuple(Tied(name, stages[0], tuple(stages[1:])) for name, stages in readers.items() if len(stages) > 1)
    return homes, tied


@dataclass
class _Stages:
    """Places the stages one after the other.

    Each takes its values in the layouts in which the one before returns them.
    """

    compiler: Compiler
    options: StepOptions
    trained: Sequence[str]
    updates: Mapping[str, Updating]
    captured: Captured
    attrs: Mapping[str, DistAttr]
    schedule: PipelineSchedule
    traced: Program
    micro: Micro
    homes: Mapping[str, int]

    def __post_init__(self) -> None:
        self.stages: list[Stage] = []
        self.reports: list[PassReport] = []

    def place(self, number: int, mesh: Mesh, part: StageProgram) -> None:
        """Place the next stage."""
        attrs = dict(self.attrs)
        if self.stages:
            before = self.stages[-1]
            attrs |= {part.from_before[value]: before.sent(value)[1].attr for value in part.from_before}
        foreign = {name for name, home in self.homes.items() if home != number}
        updates = {name: how for name, how in self.updates.items() if name in part.gradients and name not in foreign}
        what = within(part.program, self.micro.program, self.options.recompute)
        options = replace(self.options, recompute=what)
        compiler = MicroCompiler(
            replace(self.compiler, mesh=mesh, whole=False), options, self.trained, updates, self.captured,
            attrs, PassReport("cut", 0.0),
        )  # fmt: skip
        compiler.reports.clear()
        names = {name_of(node) for node in part.program.placeholders}
        divides = any(count_name(k) in names for k in range(len(self.micro.terms.counts)))
        terms = self.micro.terms if divides else Terms()
        made = compiler.placed(
            self.traced, Micro(part.program, terms, part.gradients), foreign=foreign, execution=OF_STAGES,
            split_backward=self.schedule.is_split, gathers_apart=gathers_apart(self.schedule),
        )  # fmt: skip
        counting = self._counting(compiler, made) if divides else None
        self.stages.append(Stage(number, mesh, part, made.program, made, counting))
        self.reports += about(f"stage {number}", compiler.reports)

    def _counting(self, compiler: MicroCompiler, made: MicroBatch) -> Counting:
        """Place the programs of the counts on a stage."""
        inputs = {name_of(n): compiler.attrs[n.name] for n in made.program.placeholders if n.name in compiler.attrs}
        programs = count_parts(self.traced, self.micro.terms, self.options.count, self.captured.device)
        placed: list[Placed] = []
        for program in programs:
            verify(program, "count")
            attrs = {n.name: inputs[name_of(n)] for n in program.placeholders if name_of(n) in inputs}
            local, reports, _ = compiler.compiler.place(program, attrs, self.captured.device, execution=OF_STEPS)
            compiler.reports += about("count", reports)
            placed.append((program, local))
        return Counting(*placed)
