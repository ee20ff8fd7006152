"""Compile the programs that end a step: the update, and what it runs in.

On a mesh the last micro-batch is merged with the update. On stages the update is one program of all of them, whose
messages between stages are lines:

    loss : f32[] +dp @s1 = buffer('.loss')              embed.weight is read by the last stage, too: its sum goes home
    embed_weight_grad : f32[64 16] +dp @s0 = buffer('embed.weight.grad')
    embed_weight_grad_1 : f32[64 16] +dp @s1 = buffer('embed.weight.grad')
    update:
      embed_weight_grad_1_dp : f32[64/dp 16] @s1 = reduce_scatter(embed_weight_grad_1, 0, dp)
      embed_weight_grad_1_dp_s0 : f32[64/dp 16] @s1 = send(embed_weight_grad_1_dp, s0)
      …
      squares_2 : f32[] +dp +pp = autopar::over_stages([squares, squares_1], f32, …)
      squares_2_pp_dp : f32[] = all_reduce(squares_2, (pp, dp))

With ``across=True`` the rotated step takes their place, if anything crosses the end of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.nodes import name_of, operands, record_of, set_record
from autopar.ir.program import Program
from autopar.ir.value_names import LOSS
from autopar.model.compiled import Compiler
from autopar.report.progress import doing
from autopar.scheduling.programs.order import Execution
from autopar.step.across.across import rotated_update
from autopar.step.compiling.compiled_step import CompiledMicro, StepUpdate
from autopar.step.compiling.update import Norm, Trained, update_of
from autopar.step.options import StepOptions
from autopar.verify.levels import verify


@doing("update")
def compile_update(
    compiler: Compiler, trained: Sequence[Trained], micro: CompiledMicro, options: StepOptions
) -> StepUpdate:
    """Compile the optimizer's step that follows such micro-batches."""
    norm = Norm(options.clip_norm, micro.untrained) if options.measured else None
    ending = update_of(
        trained, micro.loss, micro.captured.device, norm=norm,
        scaling=options.loss_scale if options.scaled else None, ema=options.ema, staged=micro.staged,
    )  # fmt: skip
    _give_loss_its_source(ending.program, micro.program)
    verify(ending.program, "update")
    states = frozenset(name_of(node) for node in ending.program.placeholders if record_of(node).role == "state")
    placed, reports = micro.place_update(compiler, ending, Execution(whole=True, written=states))
    made = StepUpdate(*placed, placed, states, ending.returns, tuple(reports))
    if options.across:
        assert micro.program.mesh is not None
        whole = replace(compiler, mesh=micro.program.mesh)
        made = rotated_update(whole, made, *micro.turned(ending.program), options)
    if made.crossing:
        return made
    of_last = Execution(whole=True, written=states, from_zero=options.count == 1)
    last, more = micro.ended(compiler, placed, of_last)
    rows = [*made.reports, *more]
    if made.note:
        at = min(len(reports), len(rows) - 1)
        rows[at] = replace(rows[at], notes=(made.note,))
    return replace(made, last=last, reports=tuple(rows))


def _give_loss_its_source(update: Program, micro: Program) -> None:
    """Give the update's sum of losses the user's line of the loss. Errors often quote it, because ranks often wait in
    its reduction."""
    rows = zip(operands(micro.output), record_of(micro.output).results, strict=True)
    next_states = {result.of: record_of(node) for node, result in rows if result.kind == "state"}
    in_update, in_micro = (
        [node for node in program.placeholders if name_of(node) == LOSS] for program in (update, micro)
    )
    loss = next_states[in_micro[0].name]
    for node in in_update:
        set_record(node, record_of(node)._replace(source=loss.source, module=loss.module))
