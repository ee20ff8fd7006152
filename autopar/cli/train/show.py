"""Print the output of a training: the decisions, the progress, and the comparison of the curves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text as Line

from autopar.cli.output import WIDTH
from autopar.cli.train.check import Checked
from autopar.cli.train.curve import Comparison, allowed
from autopar.cli.train.loop import TrainedStep
from autopar.cli.train.options import NONE, TrainOptions
from autopar.cli.train.presets import TRAININGS
from autopar.elastic.start import Start
from autopar.elastic.torchrun import restarts_left
from autopar.report.passes import PRICE, Reports
from autopar.report.transfers import bytes_per_axis, transfers_of
from autopar.search.solutions.solution import Solution
from autopar.step.pipelined.solution import PipelinedSolution
from autopar.step.program import Step as Program

MODULE = 31  # the end of a module's path that a table shows
LINES = 10  # lines of progress without a terminal
CAST = "cast"
NAMES = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}


def show_request(console: Console, checked: Checked, parameters: int) -> None:
    """Print what is trained, on which mesh and devices."""
    o, size = checked.options, checked.size
    where = f"{checked.mesh.size} {'processes' if checked.processes else 'simulated ranks'} on {checked.device.type}"
    if o.preset is not None:
        console.print(f"preset {o.preset}: {TRAININGS[o.preset].what}")
    console.print(
        f"Llama {checked.size_name}: {size.layers} layers, {parameters:,} parameters, {o.dtype}\n"
        f"mesh {checked.mesh}, plan {checked.plan_name}: {where}\n"
        f"{o.steps} steps of {o.batch} × {o.sequence} bytes of {checked.text.name} ({len(checked.text.data):,} bytes), "
        f"{NAMES[o.optimizer]}, lr {checked.lr:g}, seed {o.seed}"
    )
    if parts := _parts(checked):
        console.print(", ".join(parts))
    console.print()


def _parts(checked: Checked) -> list[str]:
    """Describe the further options of a step; empty by default."""
    o = checked.options
    shown = (
        (o.microbatches > 1, f"{o.microbatches} micro-batches"),
        (o.amp != NONE, f"{o.amp}"),
        (checked.scaling is not None, f"loss scale from {checked.scaling.initial if checked.scaling else 1:g}"),
        (o.recompute != NONE, f"recompute {o.recompute}"),
        (o.zero > 0, f"ZeRO {o.zero}"),
        (o.clip_norm != math.inf, f"norm clipped to {o.clip_norm:g}"),
        (o.weight_decay != TrainOptions.weight_decay, f"weight decay {o.weight_decay:g}"),
        (o.warmup > 0, f"{o.warmup} steps of warm-up, then a cosine"),
    )
    return [words for holds, words in shown if holds]


def show_decisions(
    console: Console, reports: Reports, step: Program, solution: Solution | PipelinedSolution | None
) -> None:
    """Print the notes of the passes, the table of the transfers of a whole step, and the number of casts.

    Of a searched plan, the table by module and the certificate stand in the place of the note with its price.
    """
    for report in reports:
        for note in () if report.name == PRICE else report.notes:
            console.print(f"{report.name}: {note}")
    if solution is not None:
        console.print(f"\n{solution}", soft_wrap=True, end="")
    right = (Column(name, justify="right", no_wrap=True) for name in ("times", "bytes"))
    left = [Column(name, no_wrap=True) for name in ("transfer", "axis", "phase")]
    table = Table(
        *left, *right, Column("module", no_wrap=True, min_width=MODULE),
        Column("line", no_wrap=True, overflow="ellipsis"), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
        show_edge=False, header_style="bold",
    )  # fmt: skip
    casts, total = 0, Counter[str]()
    widest = 0
    for name, program in step.programs.items():
        runs = step.microbatches if name == "micro" or name.endswith((" micro", " sums")) else 1
        total.update({axis: count * runs for axis, count in bytes_per_axis(program).items()})
        for row in transfers_of(program):
            if row.transfer == CAST:
                casts += row.times * runs
                continue
            module = row.module or "the root"
            module = module if len(module) <= MODULE else "…" + module[1 - MODULE :]
            line = row.source if console.width > WIDTH else row.source.partition("  ")[0]
            moved = f"{row.bytes * runs:,}"
            widest = max(widest, len(moved))
            table.add_row(row.transfer, row.axis, row.phase, str(row.times * runs), moved, Line(module), Line(line))
    table.columns[4].min_width = widest  # otherwise rich would shrink the widest column
    console.print()
    console.print(table)
    by_axis = ", ".join(f"{axis} {count:,}" for axis, count in total.items()) or "none"
    console.print(
        f"\nbytes that a rank receives in a step, by axis: {by_axis}" + f"; {casts} casts" * bool(casts) + "\n"
    )


def show_resumed(console: Console, options: TrainOptions, taken: int, start: Start | None) -> None:
    """Print from which step the training goes on."""
    if start is not None:
        console.print(f"elastic: {start}; {options.microbatches} micro-batches of a batch of {options.batch}")
        if restarts_left() == 0:
            console.print("elastic: torchrun's --max-restarts are used up, so the next loss ends the job")
        console.print()
    elif options.resume and not taken:
        console.print(f"{options.checkpoint} has no checkpoint: step 1 is the first\n")
    elif options.resume:
        console.print(f"resumed from {options.checkpoint}, after step {taken} of {options.steps}\n")


def show_saved(console: Console, path: Path, taken: int) -> None:
    console.print(f"  step {taken}: {path} is whole", soft_wrap=True)


def show_steps(
    console: Console, title: str, steps: Iterable[TrainedStep], count: int, tokens: int, first: int = 0
) -> Iterator[TrainedStep]:
    """Yield the same steps, from ``first`` to ``count``, and show their progress.

    It is a bar on a terminal, else some lines.
    """
    if not console.is_terminal or console.quiet:
        console.print(title)
        every = max(1, round(count / LINES))
        for step, rate in _rates(steps, tokens, first):
            if (step.number + 1) % every == 0 or step.number in (first, count - 1):
                console.print(
                    f"  step {step.number + 1:>{len(str(count))}}/{count}  loss {step.loss:.4f}  {rate:>9,.0f} tokens/s"
                )
            yield step
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[rate]} tokens/s"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=count, completed=first, loss="–", rate="–")
        for step, rate in _rates(steps, tokens, first):
            bar.update(task, advance=1, loss=f"{step.loss:.4f}", rate=f"{rate:,.0f}")
            yield step


def _rates(steps: Iterable[TrainedStep], tokens: int, first: int) -> Iterator[tuple[TrainedStep, float]]:
    """Yield each step with the tokens per second so far.

    The first step, a warm-up, counts only until there is another.
    """
    seconds = 0.0
    for step in steps:
        taken = step.number - first
        seconds = step.seconds if taken <= 1 else seconds + step.seconds
        yield step, tokens * max(1, taken) / seconds


def show_comparison(
    console: Console, losses: Comparison, norms: Comparison, checked: Checked, differently: Sequence[int]
) -> None:
    """Print the losses of some steps side by side, the differences of losses and of gradient norms, and the verdict.

    ``differently``: the steps that one of both skipped.
    """
    names = ("step", f"loss, {checked.mesh}", "loss, single device", "difference", "of gradient norms")
    table = Table(
        *(Column(name, justify="right") for name in names),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        header_style="bold",
    )
    for step in sorted({*losses.steps(), norms.worst}):
        marked = [
            f"{curve.difference(step):.1e}" + (" ←" if step == curve.worst else "  ") for curve in (losses, norms)
        ]
        table.add_row(str(step + 1), f"{losses.parallel[step]:.6f}", f"{losses.single[step]:.6f}", *marked)
    console.print()
    console.print(table)
    limits, last = checked.tolerance, len(losses.single) - 1
    of_losses, of_norms = (_tolerance(first, limits.growth, last) for first in (limits.loss, limits.norm))
    equal = losses.within(limits.loss, limits.growth) and norms.within(limits.norm, limits.growth)
    if differently:
        verdict = (
            f"NOT the same numbers: step {differently[0] + 1} overflowed on one side alone, at the edge of "
            f"fp16; try a smaller --loss-scale"
        )
    elif not math.isfinite(losses.largest + norms.largest):
        worst = losses.worst if not math.isfinite(losses.largest) else norms.worst
        verdict = f"NOT finite: step {worst + 1}; try a smaller --lr"
    else:
        skipped = (
            f"\n{len(norms.skipped)} steps were skipped by both: their gradients overflowed" if norms.skipped else ""
        )
        verdict = (
            f"{'the same' if equal else 'NOT the same'} numbers: {len(losses.single)} losses differ by "
            f"{losses.largest:.1e} at most (step {losses.worst + 1}), the tolerance is {of_losses}\n"
            f"the norms of their gradients differ by {norms.largest:.1e} at most (step {norms.worst + 1}), the "
            f"tolerance is {of_norms}{skipped}"
        )
    console.print(f"\n{verdict}", style="green" if equal else "bold red")


def _tolerance(first: float, growth: float, last: int) -> str:
    """Return the tolerance in words: that of the first step, and where it grows that of the last."""
    end = allowed(first, growth, last)
    return f"{first:.0e}" if end < 4 * first else f"{first:.0e} in the first step and {end:.0e} in the last"
