"""Say what a step on stages runs: around the slots of its schedule, all ranks run the programs of all stages.

copies of parameters · counts · slots of the schedule · outputs and buffers · update
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from autopar.ir.mesh import PIPELINE, Mesh, stage_name, stage_number
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.value_names import count_name, stacked_name, total_name
from autopar.model.stage_homes import StageHomes
from autopar.pipeline import Slot, Task
from autopar.pipeline.memory import Held
from autopar.runtime.interface import Interface
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.lowering.bundles import Bundle
from autopar.runtime.running.functions import PlacedProgram
from autopar.runtime.running.messages import Messages
from autopar.runtime.running.rank import ProgramKey, RankRun
from autopar.runtime.running.slots import SlotFacts, SlotRunner, StageMessages
from autopar.step.compiling.compiled_step import Placed, StepUpdate
from autopar.step.pipelined.calls.staged_call import StagedCall
from autopar.step.pipelined.placing.joined import messages_in
from autopar.step.pipelined.placing.programs import CutStage, PipelinedMicro, Stage
from autopar.step.pipelined.placing.share import StageOutput, outputs_of_stages
from autopar.step.running import StepRuns, held_types, types_in
from autopar.timetable import Entry, Position, Timetable
from autopar.timetable.entry import Line
from autopar.timetable.rules import cross_update, end_of_crossing

Tables = tuple[Timetable, Timetable, Timetable | None]  # as of ``StepRuns``
ByStage = dict[int | None, Mapping[str, TensorType]]  # stage → types by name


def of_stages(micro: PipelinedMicro, update: StepUpdate, mesh: Mesh) -> StepRuns:
    """Return what a step on stages runs."""
    programs = _around(micro.around)
    ending = "turn" if update.crossing else "update"
    programs[ending, None] = PlacedProgram(*update.last, update.returns, update.states, handed_sums=update.sums)
    for stage in micro.stages:
        if stage.micro.copy is not None:
            programs["gather", stage.number] = PlacedProgram(*stage.micro.copy, (), of_stage=True)
        programs["micro", stage.number] = passes_of(stage.number, micro.program, micro.local)
    schedule = micro.schedule
    places: list[tuple[tuple[int, ...], tuple[int, ...], list[Line]]] = []
    for at, stages in enumerate(schedule.stages_of):
        ranks = tuple(rank for rank in mesh.ranks if mesh.coordinates(rank)[PIPELINE] == at)
        slots = [row[at] for row in schedule.slots if row[at]]
        lines = [*_lines(micro.around, schedule.batches, slots), Entry("update", takes=("sums",))]
        places.append((ranks, stages, lines))

    def table(rule: Callable[[list[Line]], list[Line]], batches: int = schedule.batches) -> Timetable:
        positions = [Position(ranks, stages, tuple(rule(lines))) for ranks, stages, lines in places]
        return Timetable(batches, tuple(positions), schedule.name)

    tables: Tables = (own := table(list)), own, None
    if update.crossing:
        behind, alone = (table(partial(cross_update, behind=behind)) for behind in (True, False))
        tables = behind, alone, table(lambda lines: end_of_crossing(), 0)
    held: ByStage = {stage.number: held_of_stage(micro, update, stage) for stage in micro.stages}
    return _runs(tables, programs, micro.inputs, held, micro.stages, micro.program, mesh,
                 "W" if schedule.is_split else "B", outputs_of_stages(micro.stages), micro.whole)  # fmt: skip


def of_call(call: StagedCall, mesh: Mesh) -> StepRuns:
    """Return what a call of a model on stages runs: its forward, from stage to stage; the outputs go to all stages.

    ranks 0-1, stage 0                                  ranks 2-3, stage 1
      copy hands copies                                   copy hands copies
      FW00@0                                              FR00@1<0 FW00@1
      FS00@0>1                                            share takes outputs
      share takes outputs                                 BW00@1                   with gradients, when they are asked for
      BR00@0<1 BW00@0                                     BS00@1>0
      home takes sums hands sums                          home takes sums hands sums
      gradients takes outputs                             gradients takes outputs

    The forward is ``alone``, the backward is ``end``.
    """  # noqa: E501
    stages = call.stages
    at = [mesh.coordinates(stage.mesh.ranks[0])[PIPELINE] for stage in stages]
    programs = _around(call.around, call.made)
    programs |= {("micro", stage.number): passes_of(stage.number, call.program, call.local) for stage in stages}
    forward, backward = [], []
    behind: list[Line] = [Entry("home", takes=("sums",), hands=("sums",))] * ("home" in call.around)
    behind += [Entry("gradients", takes=("outputs",))] * ("gradients" in call.around)
    for position in sorted(set(at)):
        own = tuple(number for number, other in enumerate(at) if other == position)
        ranks = tuple(stages[own[0]].mesh.ranks)
        slots = [slot for number in own for slot in _slots("F", number, at)]
        back = [slot for number in reversed(own) for slot in _slots("B", number, at)]
        forward.append(Position(ranks, own, _lines(call.around, 1, slots)))
        backward.append(Position(ranks, own, (*back, *behind)))
    alone = table = Timetable(0, tuple(forward))
    end = Timetable(0, tuple(backward)) if call.positions else None
    if end is not None:
        both = zip(alone.positions, end.positions, strict=True)
        table = Timetable(0, tuple(replace(f, lines=(*f.lines, *b.lines)) for f, b in both))
    held: ByStage = {}
    for stage in stages:
        types = _held_on((stage.program,), call.around.values(), stage.number)
        held[stage.number] = _kept_here(types, call.homes, stage.number)
    return _runs((table, alone, end), programs, call.inputs, held, stages, call.program, mesh,
                 "B" if call.positions else "F", call.returned, call.whole)  # fmt: skip


def _runs(
    tables: Tables, programs: Mapping[ProgramKey, PlacedProgram], inputs: Sequence[str], held: ByStage,
    stages: Sequence[CutStage], program: Program, mesh: Mesh, last: str, made: Sequence[StageOutput], whole: bool,
) -> StepRuns:  # fmt: skip
    """Return what runs. ``last``: the last pass of a micro-batch; ``whole``: whether a rank gets all of an output."""
    at = tuple(mesh.coordinates(stage.mesh.ranks[0])[PIPELINE] for stage in stages)
    types: ByStage = {stage.number: stage.types for stage in stages}
    types |= {None: {name: type for key in ("sums", "count") if (key, None) in programs
                     for name, type in types_in(programs[key, None].program).items()}}  # fmt: skip

    @cache
    def facts(rank: int) -> SlotFacts:
        own = {s.number: stage_messages(program, s.number, rank) for s in stages if rank in s.mesh}
        return SlotFacts(at, last, own)

    def slots_of(rank: int, messages: Messages) -> Callable[[RankRun], SlotRunner]:
        return lambda run: SlotRunner(facts(rank), run, messages)

    def outputs(rank: int) -> Sequence[TensorType]:
        own = next(stage.mesh for stage in stages if rank in stage.mesh)
        return [output.on(own, whole) for output in made]

    return StepRuns(*tables, programs, inputs, held, types, outputs, slots_of)


LABELS = {"sums": total_name, "count": count_name, "share": stacked_name}  # what programs return


def _around(placed: Mapping[str, Placed], made: Sequence[StageOutput] = ()) -> dict[ProgramKey, PlacedProgram]:
    """Return the programs of all stages around the slots. ``made``: the outputs of a call, the gradients last."""
    found: dict[ProgramKey, PlacedProgram] = {}
    for name, (program, local) in placed.items():
        count = len(Interface.of(program).returned)
        first = len(made) - count if name == "gradients" else 0
        labels = [LABELS.get(name, stacked_name)(k) for k in range(first, first + count)]
        found[name, None] = PlacedProgram(program, local, labels)
    return found


def _lines(around: Collection[str], batches: int, slots: Sequence[Slot]) -> tuple[Line, ...]:
    """Return what the ranks of a position along the pipeline run.

    Args:
        around: the programs of all stages that there are.
        batches: the number of micro-batches.
        slots: the slots of the position.
    """
    lines: list[Line] = [Entry("copy", hands=("copies",))] * ("copy" in around)
    if "count" in around:
        lines += [Entry("sums", batch=k, takes=("inputs",), hands=("totals",)) for k in range(batches)]
        lines.append(Entry("count", batch=0, takes=("inputs", "totals"), hands=("counts",)))
    return (*lines, *slots, *[Entry("share", takes=("outputs",))] * ("share" in around))


def _slots(of: Held, number: int, at: Sequence[int]) -> list[Slot]:
    """Return the slots of the forward or the backward of a stage. ``at``: the position of each stage."""
    ahead = 1 if of == "F" else -1
    before, behind = (k if 0 <= k < len(at) and at[k] != at[number] else None for k in (number - ahead, number + ahead))
    compute = () if before is None else (Task(f"{of}R", number, 0, before),)
    sends = [] if behind is None else [Slot((Task(f"{of}S", number, 0, behind),))]
    return [Slot((*compute, Task(f"{of}W", number, 0))), *sends]


def passes_of(number: int, program: Program, local: LocalPrograms) -> PlacedProgram:
    """Return the program of the passes of a stage, from that of all stages."""
    name = stage_name(number)
    sent_back = [
        message.value
        for (sender, _, phase), messages in messages_in(program).items()
        if (sender, phase) == (name, "backward")
        for message in messages
    ]
    return PlacedProgram(program, local, sent_back=sent_back, of_stage=True, stage=name)


def stage_messages(program: Program, number: int, rank: int) -> StageMessages:
    """Return what a stage of a rank sends and receives in its passes."""
    name, bundles = stage_name(number), dict[tuple[int, str], Bundle]()
    received: dict[str, list[str]] = {}
    sent: dict[str, list[str]] = {}
    for (sender, receiver, phase), messages in messages_in(program).items():
        if name not in (sender, receiver):
            continue
        of = {"forward": "F", "backward": "B"}[phase]
        boundary = min(stage_number(sender), stage_number(receiver))
        bundles[boundary, of] = Bundle([message.crossed for message in messages], rank)
        if name == sender:
            sent[of] = [message.value for message in messages]
        else:
            received[of] = [message.received for message in messages]
    return StageMessages(bundles, received, sent)


def held_of_stage(micro: PipelinedMicro, update: StepUpdate, stage: Stage) -> dict[str, TensorType]:
    """Return the types of what the ranks of a stage keep between steps, by name: what no other stage keeps."""
    return _kept_here(types_of_held(micro, update, stage), micro.stage_homes, stage.number)


def types_of_held(micro: PipelinedMicro, update: StepUpdate, stage: Stage) -> dict[str, TensorType]:
    """Return the types of what a stage reads between steps: its parameters and buffers, and the optimizer's state."""
    alone = (stage.program, *([stage.micro.copy[0]] if stage.micro.copy is not None else []))
    types = _held_on(alone, (update.last, *micro.around.values()), stage.number)
    return types | {name: micro.parameters[name] for name in types if name in micro.parameters}


def _held_on(own: Iterable[Program], of_all: Iterable[Placed], stage: int) -> dict[str, TensorType]:
    """Return the types of what stays between steps in programs of a stage, and in those of all stages."""
    types: dict[str, TensorType] = {}
    for program in own:
        types |= held_types(program)
    for program, _ in of_all:
        types |= held_types(program, stage_name(stage))
    return types


def _kept_here(types: Mapping[str, TensorType], homes: StageHomes, stage: int) -> dict[str, TensorType]:
    """Return those types whose values no other stage keeps, in the layouts of parameters."""
    return {
        name: TensorType(type.shape, type.dtype, homes.layouts.get(name, type.layout))
        for name, type in types.items()
        if homes.stage.get(name, stage) == stage
    }
