"""Decide what crosses the end of a step, and compile the rotated step.

Without clipping, the reductions of gradients cross: each parameter is updated in the next step, before it is first read
there. Where each update depends on all gradients, because their norm clips or measures them or because they may
overflow, the updates stay, and the gathers of the updated parameters cross. They exist where ZeRO shards the state of
the optimizer and not the parameters.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from autopar.gc_pause import gc_paused
from autopar.ir.program import Program
from autopar.model.compiled import Compiler
from autopar.report.passes import PassReport
from autopar.scheduling.programs.order import Execution
from autopar.step.compiled_step import MicroBatch, Placed, about
from autopar.step.options import StepOptions
from autopar.step.rotated_program import Cut, gathers_cross, reductions_cross, rotate
from autopar.verify.levels import verify

NOTHING = "nothing crosses the end of a step"


@dataclass(frozen=True)
class Turn:
    """A rotated step: it finishes the step before, and runs one up to what crosses its end.

    Attributes:
        placed: its program and its local programs.
        crossing: the names of the collectives that are started in the step before.
        reports: what each pass did.
    """

    placed: Placed
    crossing: tuple[str, ...]
    reports: tuple[PassReport, ...]


def turn_of(
    compiler: Compiler, micro: MicroBatch, update: Program, options: StepOptions, written: frozenset[str]
) -> tuple[Turn | None, str]:
    """Return the rotated step, and a note that says what crosses; ``None`` if nothing does.

    Args:
        update: explicit.
        written: the names of the states that the update replaces.
    """
    cut, note = _cut(micro, update, options)
    if cut is None:
        return None, note
    start = time.perf_counter()
    with gc_paused():
        rotated = rotate(micro.program, update, cut)
    ms = (time.perf_counter() - start) * 1e3
    verify(rotated.program, "rotate")
    execution = Execution(whole=True, written=written, from_zero=True, across=rotated.crossing)
    local, reports = compiler.localize(rotated.program, execution)
    rows = PassReport("rotate", ms, notes=(note,)), *about("rotate", reports)
    return Turn((rotated.program, local), rotated.crossing, rows), note


def _cut(micro: MicroBatch, update: Program, options: StepOptions) -> tuple[Cut | None, str]:
    """Return what of the update runs in the next step, if anything does, and a note."""
    if options.count > 1:
        return None, f"{NOTHING}: several micro-batches run before its update"
    if micro.copy is not None:
        return None, f"{NOTHING}: the low-precision copies of all parameters are made before the forward"
    if not options.measured and not options.scaled:
        cut = reductions_cross(micro.program, update)
        note = f"{len(cut.crossing)} reductions of gradients cross the end of a step"
    else:
        cut = gathers_cross(update)
        why = "the loss is scaled" if options.scaled else "the norm of the gradients is measured"
        note = f"{len(cut.crossing)} gathers of parameters cross the end of a step, and no reductions: {why}, so that "
        note += "each update depends on all gradients"
        if not cut.crossing:
            return None, (
                f"{NOTHING}: {why}, so that each update depends on all gradients, and no updated parameter is gathered"
            )
    if not cut.crossing:
        return None, f"{NOTHING}: no gradient is reduced over ranks"
    return cut, f"{note}; times are those of a step behind another one"
