"""Decide what crosses the end of a step, and compile the rotated step.

Without clipping, the reductions of gradients cross: each parameter is updated in the next step, before its first reader
there. Each update depends on all gradients if these are clipped by their norm, if their norm is returned, or if they
may overflow (fp16). Then the updates stay in their step, and the gathers of the updated parameters cross. There are
such gathers where ZeRO shards the optimizer's state and not the parameters.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from autopar.gc_pause import gc_paused
from autopar.ir.program import Program
from autopar.model.compiled import Compiler
from autopar.report.passes import PassReport
from autopar.scheduling.programs.order import Execution
from autopar.step.across.cut import Cut, gathers_cross, reductions_cross
from autopar.step.across.rotated_program import rotate
from autopar.step.compiling.compiled_step import StepUpdate, about
from autopar.step.options import StepOptions
from autopar.verify.levels import verify

NOTHING = "nothing crosses the end of a step"


def rotated_update(
    compiler: Compiler, made: StepUpdate, program: Program, ending: Program, counts: Sequence[str],
    options: StepOptions,
) -> StepUpdate:  # fmt: skip
    """Return the programs that end a step, with the rotated step as the last one, and a note that says what crosses.

    If nothing crosses, they have the note alone.

    Args:
        made: the programs, of a step whose end nothing crosses.
        program: the first micro-batch, with the counts of all; without ops where slots run the micro-batches.
        ending: the explicit program of the update, with the copies of parameters.
        counts: as of ``rotate``.
    """
    start = time.perf_counter()
    with gc_paused():
        cut, note = _cut(program, ending, options)
        if cut is None:
            return replace(made, note=note)
        rotated = rotate(program, ending, cut, counts)
    ms = (time.perf_counter() - start) * 1e3
    verify(rotated.program, "rotate")
    execution = Execution(whole=True, written=made.states, from_zero=options.count == 1, across=rotated.crossing)
    local, reports = compiler.localize(rotated.program, execution)
    rows = (*made.reports, PassReport("rotate", ms, notes=(note,)), *about("rotate", reports))
    return replace(
        made, last=(rotated.program, local), reports=rows, crossing=rotated.crossing, note=note, sums=rotated.sums
    )


def _cut(micro: Program, update: Program, options: StepOptions) -> tuple[Cut | None, str]:
    """Return the cut of the update, ``None`` if nothing crosses, and a note that says what crosses."""
    waits = _why_updates_wait(options)
    if not waits:
        alone = options.count == 1 and options.schedule is None
        cut = reductions_cross(micro, update, alone=alone)
        note = f"{len(cut.crossing)} reductions of gradients cross the end of a step"
        waits = "" if cut.crossing or alone else "no gradient is reduced behind the last micro-batch"
    if waits:
        cut = gathers_cross(update)
        note = f"{len(cut.crossing)} gathers of parameters cross the end of a step, and no reductions: {waits}"
        if not cut.crossing:
            return None, f"{NOTHING}: {waits}, and no updated parameter is gathered"
    if not cut.crossing:
        return None, f"{NOTHING}: no gradient is reduced over ranks"
    return cut, f"{note}; times are those of a step behind another one"


def _why_updates_wait(options: StepOptions) -> str:
    """Return why each update must wait for all gradients; empty if it need not."""
    reasons = {"the loss is scaled": options.scaled, "the norm of the gradients is measured": options.measured}
    found = next((reason for reason, holds in reasons.items() if holds), "")
    return found and f"{found}, so that each update depends on all gradients"
