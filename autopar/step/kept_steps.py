"""Keep the programs of training steps for other processes: those of a micro-batch, and those that end the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.cache.cache import Codec
from autopar.cache.described import described_options
from autopar.cache.folder import NotCached
from autopar.cache.program_rows import Types, attr_row, op_name
from autopar.cache.records import Leaf, Records
from autopar.model.compiled import RUNS, Compiler
from autopar.model.kept_calls import C, codec_of_captured, facts_of_call
from autopar.optimizers.update import Update
from autopar.step.compiling.compiled_step import StepUpdate
from autopar.step.compiling.outputs import loss_of
from autopar.step.compiling.request import MicroRequest
from autopar.step.compiling.update import Trained
from autopar.step.options import StepOptions


def facts_of_micro(compiler: Compiler, request: MicroRequest) -> dict[str, object]:
    """Return what decides the programs of a micro-batch, as JSON by name.

    Raises:
        NotCached: something that decides it has no text.
    """
    return {
        **facts_of_call(compiler, request.call, request.notes),
        "step": described_options(request.options),
        "trained": list(request.trained),
        "cut": sorted(request.cut),
        "updates": [[name, _update(update), described_options(dict(types))] for name, (update, types) in
                    request.updates.items()],
    }  # fmt: skip


def _update(update: Update) -> list[object]:
    if update.op is None:
        raise NotCached("the optimizer's step is Python code")
    return [op_name(update.op), list(update.states), described_options(dict(update.constants)), list(update.counted),
            update.elementwise, sorted(update.scheduled)]  # fmt: skip


def codec_of_micro(
    kind: str, record: type[C], compiler: Compiler, request: MicroRequest, more: Mapping[Any, Leaf]
) -> Codec[C]:
    """Return how the programs of a micro-batch are kept. ``more``: as in ``codec_of_captured``."""
    return codec_of_captured(
        kind, record, compiler, request.call, lambda: facts_of_micro(compiler, request), more, loss_of
    )


def codec_of_update(
    compiler: Compiler, digest: str, trained: Sequence[Trained], options: StepOptions
) -> Codec[StepUpdate]:
    """Return how the programs that end a step are kept. ``digest``: that of the micro-batch."""
    return Codec(
        kind="update",
        model=None,
        facts=lambda: facts_of_update(compiler, digest, trained, options),
        guards=lambda update: None,
        write=lambda update: Records({}).to_json(update, StepUpdate),
        read=lambda content, guards: Records({}, content, RUNS).read(content["record"], StepUpdate),
    )


def facts_of_update(
    compiler: Compiler, digest: str, trained: Sequence[Trained], options: StepOptions
) -> dict[str, object]:
    """Return what decides the programs that end a step. ``digest``: that of the micro-batch, with all that it has."""
    if not digest:
        raise NotCached("the programs of a micro-batch are not kept")
    types = Types()
    planner = compiler.planner
    job = None if compiler.context is None else compiler.context.job
    return {
        "micro": digest,
        "step": described_options(options),
        "options": described_options({
            "mesh": compiler.mesh, "plan": compiler.plan, "strict": compiler.strict, "whole": compiler.whole,
            "machine": compiler.machine, "overlap": compiler.overlap, "figures": compiler.figures,
            "planner": [planner.machine, planner.memory, planner.reserve],
            "hosts": None if job is None else job.hosts.of_rank,
        }),
        "trained": [
            [t.name, types.number(t.type), types.number(t.gradient), attr_row(t.state), _update(t.update),
             [[name, types.number(type)] for name, type in t.types.items()], t.group, t.steps, t.by]
            for t in trained
        ],
        "types": types.to_json(),
    }  # fmt: skip
