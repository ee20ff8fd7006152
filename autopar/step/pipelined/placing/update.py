"""Compile the program that ends a pipelined step: one update of all stages, whose messages between stages are lines.

loss : f32[] +dp @s1 = buffer('.loss')                embed.weight is read by the last stage, too: its sum goes home
embed_weight_grad : f32[64 16] +dp @s0 = buffer('embed.weight.grad')
embed_weight_grad_1 : f32[64 16] +dp @s1 = buffer('embed.weight.grad')
update:
  embed_weight_grad_1_dp : f32[64/dp 16] @s1 = reduce_scatter(embed_weight_grad_1, 0, dp)
  embed_weight_grad_1_dp_s0 : f32[64/dp 16] @s1 = send(embed_weight_grad_1_dp, s0)
  …
  squares_2 : f32[] +dp +pp = autopar::over_stages([squares, squares_1], f32, …)
  squares_2_pp_dp : f32[] = all_reduce(squares_2, (pp, dp))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from autopar.ir.mesh import stage_name
from autopar.ir.nodes import name_of, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.value_names import gradient_name
from autopar.model.compiled import Compiler
from autopar.report.progress import doing
from autopar.scheduling.programs.order import Execution
from autopar.step.across.across import turn_of
from autopar.step.compiling.compiled_step import StepUpdate
from autopar.step.compiling.graph_builder import GraphBuilder
from autopar.step.compiling.update import Norm, Staged, Trained, update_of
from autopar.step.options import StepOptions
from autopar.step.pipelined.placing.on_stages import Traced, place_on_stages
from autopar.step.pipelined.placing.programs import PipelinedMicro


@doing("update")
def compile_pipelined_update(
    compiler: Compiler, trained: Sequence[Trained], micro: PipelinedMicro, options: StepOptions
) -> StepUpdate:
    """Compile the optimizer's step behind the micro-batches of a pipeline."""
    device = micro.captured.device
    ending = update_of(
        trained, None, device, norm=Norm(options.clip_norm, micro.untrained) if options.measured else None,
        scaling=options.loss_scale if options.scaled else None, ema=options.ema, staged=_staged(micro),
    )  # fmt: skip
    states = frozenset(name_of(node) for node in ending.program.placeholders if record_of(node).role == "state")
    placed, reports = place_on_stages(
        replace(compiler, whole=False), "update", Traced(ending.program, ending.constraints, ending.stages),
        micro.on_stages, micro.stages[0].mesh, device, Execution(whole=True, written=states),
    )  # fmt: skip
    made = StepUpdate(*placed, placed, states, ending.returns, tuple(reports))
    if not options.across:
        return made
    whole = replace(compiler, mesh=micro.on_stages.mesh, whole=False)
    turn, note = turn_of(whole, _without_ops(placed[0]), placed[0], options, states)
    if turn is None:
        return replace(made, note=note, reports=(*reports[:-1], replace(reports[-1], notes=(note,))))
    return replace(made, last=turn.placed, reports=(*reports, *turn.reports), crossing=turn.crossing, note=note,
                   sums=turn.sums)  # fmt: skip


def _without_ops(like: Program) -> Program:
    """Return a program of all stages that computes nothing: slots run the micro-batches."""
    program = GraphBuilder(torch.device("cpu")).program(())
    program.level, program.mesh, program.stages = like.level, like.mesh, dict(like.stages)
    return program


def _staged(micro: PipelinedMicro) -> Staged:
    """Return where the values of the update are."""
    foreign: dict[str, dict[str, TensorType]] = {}
    for name, home in micro.homes.items():
        for stage in micro.stages:
            if stage.number != home and (type := stage.types.get(gradient_name(name))) is not None:
                foreign.setdefault(name, {})[stage_name(stage.number)] = type
    return Staged(
        micro.stages[0].mesh,
        {name: stage_name(home) for name, home in micro.homes.items()},
        foreign,
        {stage_name(stage.number): loss for stage in micro.stages if (loss := stage.micro.loss) is not None},
    )
