"""Compile the programs that end a step: the update, and the last micro-batch merged with it, or the rotated step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.nodes import name_of, operands, record_of, set_record
from autopar.ir.program import Program
from autopar.ir.value_names import LOSS, count_name
from autopar.model.compiled import Compiler
from autopar.report.progress import doing
from autopar.scheduling.programs.order import Execution
from autopar.step.across.across import turn_of
from autopar.step.compiling.compiled_step import MicroBatch, StepUpdate, merged
from autopar.step.compiling.merged_programs import merge_programs
from autopar.step.compiling.update import Norm, Trained, update_of
from autopar.step.options import StepOptions
from autopar.verify.levels import verify


@doing("update")
def compile_update(
    compiler: Compiler, trained: Sequence[Trained], micro: MicroBatch, options: StepOptions
) -> StepUpdate:
    """Compile the optimizer's step that follows such micro-batches."""
    device = micro.captured.device
    norm = Norm(options.clip_norm, micro.untrained) if options.measured else None
    ending = update_of(
        trained, micro.loss, device, norm=norm, scaling=options.loss_scale if options.scaled else None, ema=options.ema
    )
    _give_loss_its_source(ending.program, micro.program)
    verify(ending.program, "update")
    states = frozenset(name_of(node) for node in ending.program.placeholders if record_of(node).role == "state")
    execution = Execution(whole=True, written=states)
    local, reports, _ = compiler.place(ending.program, ending.constraints, device, execution=execution)
    turn, note = None, ""
    if options.across:
        first = micro.program if micro.first is None else micro.first[0]  # with the counts of all
        counted = [] if micro.first is None or micro.count is None else operands(micro.count[0].output)
        with_copies = ending.program if micro.copy is None else merge_programs(ending.program, micro.copy[0])
        names = [count_name(k) for k in range(len(counted))]
        turn, note = turn_of(compiler, first, with_copies, options, states, names)
    if turn is not None:
        reports += turn.reports
        about = StepUpdate(ending.program, local, turn.placed, states, ending.returns, tuple(reports))
        return replace(about, crossing=turn.crossing, note=note, sums=turn.sums)
    of_last = Execution(whole=True, written=states, from_zero=options.count == 1)
    last, more = merged(compiler, micro.program, ending.program, execution=of_last)
    reports += [replace(more[0], notes=(note,)), *more[1:]] if note else more
    return StepUpdate(ending.program, local, last, states, ending.returns, tuple(reports), note=note)


def _give_loss_its_source(update: Program, micro: Program) -> None:
    """Give the update's sum of losses the user's line of the loss. Errors often quote it, because ranks often wait in
    its reduction."""
    rows = zip(operands(micro.output), record_of(micro.output).results, strict=True)
    next_states = {result.of: record_of(node) for node, result in rows if result.kind == "state"}
    in_update, in_micro = (
        next(node for node in program.placeholders if name_of(node) == LOSS) for program in (update, micro)
    )
    loss = next_states[in_micro.name]
    set_record(in_update, record_of(in_update)._replace(source=loss.source, module=loss.module))
