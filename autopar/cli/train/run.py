"""Run one training, from the options to the exit status.

It is simulated, or runs as a rank of a job, or in processes that it starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Console

import autopar
from autopar.cli.output import output_of
from autopar.cli.train.check import Checked, check
from autopar.cli.train.curve import Comparison
from autopar.cli.train.launched import launched
from autopar.cli.train.loop import Batch, Taken, TrainedStep, train
from autopar.cli.train.model import llama
from autopar.cli.train.optimizers import OPTIMIZERS, schedule_of
from autopar.cli.train.options import RECOMPUTED, TrainOptions
from autopar.cli.train.refused import Refused
from autopar.cli.train.saved import Saved, check_resumed, differed
from autopar.cli.train.show import show_comparison, show_decisions, show_request, show_resumed, show_saved, show_steps
from autopar.cli.train.single import Single
from autopar.errors import AutoparError, LaunchError
from autopar.plan.constraints import layouts_of
from autopar.search.solutions.solution import Solution
from autopar.step.program import Step as Programs
from autopar.step.train_step import TrainStep

EQUAL, DIFFERENT, REFUSED = 0, 1, 2  # exit statuses
REPORTED = 64  # added to the exit status of a rank that this command started, if the rank has printed its error itself
STARTED = "AUTOPAR_TRAIN_STARTED"  # the environment variable of such a rank


def run(options: TrainOptions) -> int:
    """Run with these options, and return the exit status. An error is printed as one line, without a traceback."""
    try:
        status = _follow(options)
    except AutoparError as error:
        text = str(error)
        print(text if text.startswith("autopar:") else f"autopar: {text}", file=sys.stderr)
        status = REFUSED
    return status + REPORTED if status and STARTED in os.environ else status


def _follow(options: TrainOptions) -> int:
    checked = check(options, launched())
    if (taken := check_resumed(checked)) and taken == options.steps and differed(checked):
        return DIFFERENT
    if checked.processes and checked.launched is None:
        return _start(checked)
    if checked.device.type == "cuda":
        torch.cuda.set_device(checked.device)
    return _train(checked)


def _start(checked: Checked) -> int:
    """Start the same command once for each rank."""
    from autopar.runtime.processes.launch import launch

    options = replace(checked.options, device=checked.device.type)
    if not isinstance(checked.plan, (str, Solution)):  # report its errors here, once and not on each rank
        shapes = {name: (options.batch, options.sequence) for name in _batch(checked, 0)}
        layouts_of(checked.plan, _model(checked, torch.device("meta")), checked.mesh, shapes)
    command = [sys.executable, "-m", "autopar", "train", *options.arguments()]
    endpoint = None if options.port is None else f"localhost:{options.port}"
    try:
        launch(command, checked.mesh.size, endpoint=endpoint, environment={STARTED: "1"})
    except LaunchError as error:
        if error.status - REPORTED in (DIFFERENT, REFUSED):
            return error.status - REPORTED
        if error.rank is None and error.status == 1:  # no process was started
            raise
        print(error, file=sys.stderr)
        return error.status
    return EQUAL


def _train(checked: Checked) -> int:
    """Train on the mesh; then the first rank trains on a single device and compares.

    It waits until the other ranks have ended.
    """
    first = checked.launched is None or checked.launched.rank == 0
    o = checked.options
    output = output_of(o, first)
    console, progress = output.text, output.notes
    model = _model(checked)
    show_request(console, checked, sum(p.numel() for p in model.parameters()))
    parallel = autopar.parallelize(model, checked.mesh, checked.plan, timeout=o.timeout, cache=o.cache)
    optimizer = _optimizer(checked, parallel)
    step = parallel.train_step(optimizer, **checked.step_options)
    schedule = schedule_of(optimizer, o.warmup, o.steps)
    programs = _captured(checked, step)
    show_decisions(console, step.reports, programs, step.solution)
    if step.pipeline is not None:
        console.print(str(step.pipeline), end="", soft_wrap=True)
    saved = Saved(checked, step, schedule)
    before = saved.resume()
    show_resumed(progress, o, len(before), saved.start)
    taken = train(_take(step, checked.processes), schedule, _batches(checked, len(before)), len(before))
    steps = [
        *before,
        *_shown(
            checked,
            f"on {checked.mesh}",
            saved.kept(before, taken, partial(show_saved, progress)),
            progress,
            len(before),
        ),
    ]
    if dist.is_initialized():
        dist.destroy_process_group()
    if not first:
        return EQUAL
    reference = _alone(checked, progress)
    losses = Comparison([step.loss for step in steps], [step.loss for step in reference])
    skipped = frozenset(
        step.number for step, other in zip(steps, reference, strict=True) if step.skipped and other.skipped
    )
    norms = Comparison([step.norm for step in steps], [step.norm for step in reference], skipped)
    differently = [step.number for step, other in zip(steps, reference, strict=True) if step.skipped != other.skipped]
    show_comparison(console, losses, norms, checked, differently)
    tolerance = checked.tolerance
    alike = losses.within(tolerance.loss, tolerance.growth) and norms.within(tolerance.norm, tolerance.growth)
    equal = not differently and alike
    if not equal and o.elastic:
        saved.note_difference()
    output.give(
        {
            "mesh": dict(checked.mesh.axes), "plan": checked.plan_name, "steps": o.steps, "equal": equal,
            "losses": losses.parallel, "single_losses": losses.single, "loss_difference": losses.largest,
            "norms": norms.parallel, "single_norms": norms.single, "norm_difference": norms.largest,
            "skipped_differently": differently,
            **({} if saved.start is None else {"resumed_after": saved.start.taken, "lost": saved.start.lost}),
        }
    )  # fmt: skip
    return EQUAL if equal else DIFFERENT


def _alone(checked: Checked, console: Console) -> list[TrainedStep]:
    """Run the same training on a single device, and return its steps."""
    o = checked.options
    model = _model(checked)
    optimizer = _optimizer(checked, model)
    single = Single(model, optimizer, o.microbatches, o.clip_norm, checked.policy, checked.scaling)
    return _shown(
        checked,
        "on a single device",
        train(single, schedule_of(optimizer, o.warmup, o.steps), _batches(checked)),
        console,
    )


def _captured(checked: Checked, step: TrainStep) -> Programs:
    """Capture the step, which also creates the optimizer's state, and return its programs.

    Globs of modules can only be checked here.
    """
    try:
        return step.capture(_batch(checked, 0))
    except ValueError as error:
        if checked.options.recompute in RECOMPUTED:
            raise
        raise Refused(
            f"--recompute {checked.options.recompute}: {error}; or use one of {', '.join(RECOMPUTED)}"
        ) from None


def _take(step: TrainStep, processes: bool) -> Callable[[Batch], Taken]:
    """Return a function that runs a step on the mesh."""

    def take(batch: Batch) -> Taken:
        loss = step(batch) if processes else step.simulate(batch)
        assert step.grad_norm is not None  # clip_norm is at least infinite
        return loss, step.grad_norm, step.skipped is not None and bool(step.skipped)

    return take


def _shown(
    checked: Checked, title: str, steps: Iterable[TrainedStep], console: Console, first: int = 0
) -> list[TrainedStep]:
    """Run all steps, and show them while they run."""
    o = checked.options
    return list(show_steps(console, title, steps, o.steps, o.batch * o.sequence, first))


def _optimizer(checked: Checked, model: torch.nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS[checked.options.optimizer](model.parameters(), checked.lr, checked.options.weight_decay)


def _batches(checked: Checked, first: int = 0) -> Iterator[Batch]:
    return (_batch(checked, step) for step in range(first, checked.options.steps))


def _model(checked: Checked, device: torch.device | None = None) -> torch.nn.Module:
    o = checked.options
    return llama(checked.size, o.sequence, o.seed, checked.dtype, device or checked.device)


def _batch(checked: Checked, step: int) -> Batch:
    o = checked.options
    return checked.text.batch(o.seed, step, o.batch, o.sequence, checked.device)
