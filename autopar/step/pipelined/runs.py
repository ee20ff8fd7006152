"""Say what a step on stages runs: around the slots of its schedule, each stage runs its programs.

copies of parameters · counts · slots of the schedule · buffers · outputs · sums that go home · numbers · updates
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import torch

from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.transfers import Ends
from autopar.ir.value_names import MEASURED, SQUARES, copy_name, count_name, total_name
from autopar.pipeline import Slot, Task
from autopar.runtime.interface import Interface
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.lowering.bundles import Bundle, Crossed
from autopar.runtime.running.carriers import PlacedProgram
from autopar.runtime.running.exchange import Move, exchange, share_buffers
from autopar.runtime.running.messages import Messages
from autopar.runtime.running.programs import output_name
from autopar.runtime.running.rank import Lines, ProgramKey, RankRun
from autopar.runtime.running.slots import SlotFacts, SlotRunner, StageMessages
from autopar.step.pipelined.calls.staged_call import StagedCall
from autopar.step.pipelined.placing.joined import messages_in, stage_name, stage_number
from autopar.step.pipelined.placing.outputs import StageOutput, outputs_of_stages, to_all_ranks
from autopar.step.pipelined.placing.programs import CutStage, PipelinedMicro, Stage, written_buffers
from autopar.step.pipelined.placing.update import PipelinedUpdate
from autopar.step.pipelined.schedules import gathers_apart
from autopar.step.running import Others, StepRuns, held_types
from autopar.timetable import Entry, Position, Timetable
from autopar.timetable.entry import Line

Shared = Sequence[tuple[StageOutput, int, Bundle]]  # an output, its number, and a rank's part of it on its way
ByStage = dict[int | None, Mapping[str, TensorType]]  # stage → types by name


def of_stages(micro: PipelinedMicro, update: PipelinedUpdate, mesh: Mesh) -> StepRuns:
    """Return what a step on stages runs."""
    programs: dict[ProgramKey, PlacedProgram] = {
        key: placed for stage in micro.stages for key, placed in _programs(stage, update)
    }
    for stage in micro.stages:
        programs["micro", stage.number] = passes_of(stage.number, micro.program, micro.local)
    for k, sent in enumerate(update.homeward):
        programs[f"home.{k}", sent.reader] = PlacedProgram(*sent.placed, ("sum",), of_stage=True)
    schedule = micro.schedule
    positions = []
    for at, stages in enumerate(schedule.stages_of):
        ranks = tuple(rank for rank in mesh.ranks if mesh.coordinates(rank)[PIPELINE] == at)
        slots = [row[at] for row in schedule.slots if row[at]]
        positions.append(
            Position(ranks, stages, tuple(_lines(micro, update, [micro.stages[k] for k in stages], slots)))
        )
    table = Timetable(schedule.batches, tuple(positions), schedule.name)

    @cache
    def facts(rank: int) -> SlotFacts:
        at = mesh.coordinates(rank)[PIPELINE]
        own = {k: stage_messages(micro.program, k, rank) for k in schedule.stages_of[at]}
        return SlotFacts(schedule.rank_of, "W" if schedule.is_split else "B", own)

    def slots_of(rank: int, messages: Messages) -> Callable[[RankRun], SlotRunner]:
        return lambda run: SlotRunner(facts(rank), run, messages)

    def outputs(rank: int) -> Sequence[TensorType]:
        own = next(stage.mesh for stage in micro.stages if rank in stage.mesh)
        return [output.on(own, micro.whole) for output in outputs_of_stages(micro.stages)]

    others = cache(lambda rank: _Others(micro, update, mesh, rank))
    held: ByStage = {stage.number: held_of_stage(micro, update, stage) for stage in micro.stages}
    types: ByStage = {stage.number: stage.input_types for stage in micro.stages}
    return StepRuns(table, table, None, programs, micro.inputs, held, types, outputs, slots_of,
                    lambda rank, messages: others(rank).of(messages))  # fmt: skip


def of_call(call: StagedCall, mesh: Mesh) -> StepRuns:
    """Return what a call of a model on stages runs: its forward, from stage to stage; the outputs go to all stages.

    ranks 0-1, stage 0                                  ranks 2-3, stage 1
      tied hands copies                                   tied hands copies
      FW00@0                                              FR00@1<0 FW00@1
      FS00@0>1                                            outputs
      outputs
    """
    stages = call.stages
    at = [mesh.coordinates(stage.mesh.ranks[0])[PIPELINE] for stage in stages]
    copied = [
        (stage.number, name)
        for stage in stages
        for name in stage.parameters
        if call.homes.stage.get(name, stage.number) != stage.number
    ]
    written = written_buffers(stages)
    positions = []
    for position in sorted(set(at)):
        own = tuple(number for number, other in enumerate(at) if other == position)
        lines: list[Line] = [Entry("tied", hands=("copies",))] * bool(copied)
        for number in own:
            lines += _forward_slots(number, at)
        lines += [Entry("buffers")] * bool(written) + [Entry("outputs")] * bool(call.made)
        positions.append(Position(tuple(stages[own[0]].mesh.ranks), own, tuple(lines)))
    table = Timetable(0, tuple(positions))

    @cache
    def facts(rank: int) -> SlotFacts:
        own = {s.number: stage_messages(call.program, s.number, rank) for s in stages if rank in s.mesh}
        return SlotFacts(tuple(at), "F", own)

    def outputs(rank: int) -> Sequence[TensorType]:
        own = next(stage.mesh for stage in stages if rank in stage.mesh)
        return [output.on(own, call.whole) for output in call.made]

    @cache
    def bundles(rank: int) -> tuple[Sequence[tuple[int, Bundle]], Sequence[Bundle], Shared]:
        tied = [(number, Bundle([_crossed(call, number, name)], rank)) for number, name in copied]
        shared = outputs_to_share(call.made, stages, 1, call.whole, rank)
        return tied, [Bundle([value], rank) for value in written], shared

    def others(rank: int, messages: Messages) -> Others:
        first, (tied, buffers, shared) = len(stages), bundles(rank)
        return {
            "tied": lambda run: send_copies(run, rank, tied, messages, first),
            "buffers": lambda run: share_buffers(rank, run.held, buffers, messages, first),
            "outputs": lambda run: share_outputs(run, rank, shared, messages, first, 1),
        }

    held: ByStage = {stage.number: _held_by_homes(call, stage) for stage in stages}
    types: ByStage = {stage.number: stage.input_types for stage in stages}
    programs: dict[ProgramKey, PlacedProgram] = {
        ("micro", stage.number): passes_of(stage.number, call.program, call.local) for stage in stages
    }
    return StepRuns(table, table, None, programs, call.inputs, held, types, outputs,
                    lambda rank, messages: lambda run: SlotRunner(facts(rank), run, messages), others)  # fmt: skip


def _forward_slots(number: int, at: Sequence[int]) -> list[Slot]:
    """Return the slots of the forward of a stage. ``at``: the position of each stage."""
    compute: tuple[Task, ...] = (Task("FW", number, 0),)
    if number and at[number - 1] != at[number]:
        compute = (Task("FR", number, 0, number - 1), *compute)
    sends = number + 1 < len(at) and at[number + 1] != at[number]
    return [Slot(compute), *([Slot((Task("FS", number, 0, number + 1),))] if sends else [])]


def _crossed(call: StagedCall, number: int, parameter: str) -> Crossed:
    """Return a parameter that another stage keeps, as a stage reads it."""
    type = call.stages[number].types[parameter]
    return Crossed(parameter, Ends(type.shape, call.homes.layouts[parameter], type.placed), type.dtype)


def _held_by_homes(call: StagedCall, stage: CutStage) -> dict[str, TensorType]:
    """Return the types of the parameters and buffers that a stage keeps."""
    return {
        name: TensorType(type.shape, type.dtype, call.homes.layouts.get(name, type.layout))
        for name, type in held_types(stage.program).items()
        if call.homes.stage.get(name, stage.number) == stage.number
    }


def _programs(stage: Stage, update: PipelinedUpdate) -> Iterable[tuple[tuple[str, int], PlacedProgram]]:
    number, ending = stage.number, update.stages[stage.number]
    if stage.micro.copy is not None:
        yield ("copy", number), PlacedProgram(*stage.micro.copy, (), of_stage=True)
    if stage.counting is not None:
        for name, placed, label in (
            ("sums", stage.counting.sums, total_name), ("count", stage.counting.counts, count_name),
        ):  # fmt: skip
            labels = [label(k) for k in range(len(Interface.of(placed[0]).returned))]
            yield (name, number), PlacedProgram(*placed, labels, of_stage=True)
    if ending.placed is not None:
        yield ("update", number), PlacedProgram(*ending.placed, ending.returns, ending.states, of_stage=True)


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


def _lines(
    micro: PipelinedMicro, update: PipelinedUpdate, stages: Sequence[Stage], slots: Sequence[Slot]
) -> Iterable[Line]:
    """Yield what the ranks of some stages run."""
    apart = gathers_apart(micro.schedule)
    for stage in stages if not apart else ():
        if stage.micro.copy is not None:
            yield Entry("copy", stage=stage.number, hands=("copies",))
    if micro.tied:
        yield Entry("tied", hands=("copies",))
    copied = {reader for tied in micro.tied for reader in tied.readers}
    for stage in stages:
        if stage.counting is not None:
            has_copies = stage.number in copied or (stage.micro.copy is not None and not apart)
            takes = ("inputs", *("copies",) * has_copies)
            for batch in range(micro.schedule.batches):
                yield Entry("sums", stage=stage.number, batch=batch, takes=takes, hands=("totals",))
            yield Entry("count", stage=stage.number, batch=0, takes=(*takes, "totals"), hands=("counts",))
    yield from slots
    if micro.written_buffers:
        yield Entry("buffers")
    if micro.outputs:
        yield Entry("outputs")
    if update.homeward:
        yield Entry("home", takes=("sums",), hands=("sums",))
    own = [stage.number for stage in stages if update.stages[stage.number].placed is not None]
    for number in own:
        yield Entry("update", "reduction", number, takes=("sums",), hands=("numbers",))
    yield Entry("numbers", takes=("numbers",) * bool(own), hands=("numbers",))
    for number in own:
        yield Entry("update", "update", number, takes=("sums", "numbers"))


def held_of_stage(micro: PipelinedMicro, update: PipelinedUpdate, stage: Stage) -> dict[str, TensorType]:
    """Return the types of what the ranks of a stage keep between steps, by name: what no other stage keeps."""
    found = types_of_held(micro, update, stage)
    return {
        name: TensorType(type.shape, type.dtype, micro.layouts.get(name, type.layout))
        for name, type in found.items()
        if micro.homes.get(name, stage.number) == stage.number
    }


def types_of_held(micro: PipelinedMicro, update: PipelinedUpdate, stage: Stage) -> dict[str, TensorType]:
    """Return the types of what a stage keeps: its parameters and buffers, and the optimizer's state; by name."""
    types: dict[str, TensorType] = {}
    ending = update.stages[stage.number].placed
    for placed in ((stage.program,), ending, stage.micro.copy):
        types |= held_types(placed[0]) if placed is not None else {}
    return types | {name: micro.parameters[name] for name in types if name in micro.parameters}


class _Others:
    """What a rank of a step on stages runs beside programs: messages that belong to no slot."""

    def __init__(self, micro: PipelinedMicro, update: PipelinedUpdate, mesh: Mesh, rank: int) -> None:
        self.micro, self.update, self.rank = micro, update, rank
        self.along = mesh.group(rank, PIPELINE)
        self.first = micro.schedule.stages  # the number of the first bundle: the boundaries of stages come before
        own = micro.schedule.stages_of[mesh.coordinates(rank)[PIPELINE]]
        self.stages = [micro.stages[number] for number in own]
        self.tied = [
            (reader, Bundle([_copied(micro, tied.name, reader)], rank))
            for tied in micro.tied
            for reader in tied.readers
        ]
        self.homeward = [Bundle([sent.value], rank) for sent in update.homeward]
        self.buffers = [Bundle([value], rank) for value in micro.written_buffers]
        self.outputs = outputs_to_share(outputs_of_stages(micro.stages), micro.stages, micro.schedule.batches,
                                        micro.whole, rank)  # fmt: skip

    def of(self, messages: Messages) -> Others:
        """Return what a rank runs, by the names of the timetable."""

        def buffers(run: RankRun) -> Lines:
            yield from share_buffers(self.rank, run.held, self.buffers, messages, self.first)

        def outputs(run: RankRun) -> Lines:
            yield from share_outputs(run, self.rank, self.outputs, messages, self.first, self.micro.schedule.batches)

        return {
            "tied": lambda run: send_copies(run, self.rank, self.tied, messages, self.first),
            "buffers": buffers, "outputs": outputs,
            "home": lambda run: self._send_home(run, messages), "numbers": lambda run: self._numbers(run, messages),
        }  # fmt: skip

    def _send_home(self, run: RankRun, messages: Messages) -> Lines:
        """Send the sums of tied parameters to their homes."""
        moves: list[Move] = []
        for k, (sent, bundle) in enumerate(zip(self.update.homeward, self.homeward, strict=True)):
            pieces = []
            if self.rank in self.micro.stages[sent.reader].mesh:
                with messages.during(f"the gradient of {sent.tied.name} of stage {sent.reader}"):
                    yield from run.call(Entry(f"home.{k}", stage=sent.reader, takes=("sums",)), "")
                pieces = [run.returned.pop("sum")]
            moves.append((bundle, pieces))
        received = yield from exchange(self.rank, moves, messages, self.first, "the gradients of tied parameters")
        for sent, pieces in zip(self.update.homeward, received, strict=True):
            if pieces:
                run.boxes["sums", sent.tied.home][sent.value.name] = pieces[0]

    def _numbers(self, run: RankRun, messages: Messages) -> Lines:
        """Add up the numbers of all stages."""
        numbers = torch.zeros(3, dtype=torch.float64, device=messages.device)
        for stage in self.stages:
            for k, name in enumerate(("loss", "squares", "measured")):
                if name in (own := run.boxes["numbers", stage.number]):
                    numbers[k] += own[name].to(torch.float64)
        vectors = yield from messages.gather(numbers, self.along)
        loss, squares, measured = torch.stack(vectors).sum(0).unbind()
        run.returned["loss"] = loss.to(
            next(stage.micro.loss.dtype for stage in self.micro.stages if stage.micro.loss is not None)
        )
        for stage in self.stages:
            if (update := run.programs.get(("update", stage.number))) is None:
                continue
            dtypes = {update.names[of]: type.dtype for of, type in update.types.items()}
            for name, value in ((SQUARES, squares), (MEASURED, measured)):
                if name in dtypes:
                    run.boxes["numbers", stage.number][name] = value.to(dtypes[name])


def send_copies(run: RankRun, rank: int, copies: Sequence[tuple[int, Bundle]], messages: Messages, first: int) -> Lines:
    """Send parameters to the stages that read them and do not keep them. ``copies``: the reader, and the message."""
    moves: list[Move] = []
    for _, bundle in copies:
        (value,) = bundle.values
        pieces = [run.held[value.name].to(value.dtype)] if rank in value.ends.source.mesh else []
        moves.append((bundle, pieces))
    received = yield from exchange(rank, moves, messages, first, "the copies of tied parameters")
    for (reader, bundle), pieces in zip(copies, received, strict=True):
        if pieces:
            run.boxes["copies", reader][copy_name(bundle.values[0].name)] = pieces[0]


def _copied(micro: PipelinedMicro, parameter: str, reader: int) -> Crossed:
    """Return a tied parameter as a stage reads it."""
    type = micro.stages[reader].types[parameter]
    return Crossed(parameter, Ends(type.shape, micro.layouts[parameter], type.placed), type.dtype)


def outputs_to_share(
    outputs: Sequence[StageOutput], stages: Sequence[CutStage], count: int, whole: bool, rank: int
) -> Shared:
    """Return a rank's part of all outputs on their way to all positions along the pipeline, each with its number.

    micro-batch 0 on stage 1, logits : f32[8 10]
    micro-batch 1 on stage 1, logits : f32[8 10]      →      stages 0 and 1, stacked : f32[2 8 10]
    """
    return [
        (output, k, Bundle([value], rank))
        for k, output in enumerate(outputs)
        for value in to_all_ranks([output.stacked(count)], stages, whole)
    ]


def share_outputs(
    run: RankRun, rank: int, outputs: Shared, messages: Messages, first: int,
    count: int,
) -> Lines:  # fmt: skip
    """Send the outputs of all micro-batches to the ranks of all stages. ``first``: as of ``exchange``."""
    moves: list[Move] = []
    stacked: dict[int, torch.Tensor] = {}
    for output, k, bundle in outputs:
        if (output.stage, 0) in run.outputs and k not in stacked:
            label = output_name(k)
            stacked[k] = torch.stack([run.outputs[output.stage, batch].pop(label) for batch in range(count)])
        moves.append((bundle, [stacked[k]] if k in stacked else []))
    received = yield from exchange(rank, moves, messages, first, "the outputs")
    for (_, k, _), pieces in zip(outputs, received, strict=True):
        for batch, piece in enumerate(pieces[0].unbind(0) if pieces else ()):
            run.outputs[None, batch][output_name(k)] = piece
