"""One training, from what was asked to the exit status: simulated, as a rank of a job, or in processes started here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import autopar
from autopar.constraints import layouts_of
from autopar.errors import AutoparError, LaunchError
from autopar.train.curve import Comparison
from autopar.train.launched import launched
from autopar.train.loop import Step, train
from autopar.train.model import llama
from autopar.train.options import Checked, Options, check
from autopar.train.show import console_of, show_comparison, show_decisions, show_request, show_steps

EQUAL, DIFFERENT, REFUSED = 0, 1, 2  # exit statuses
TOLD = 64  # added to that of a rank which this command started, when the rank has told the user itself
STARTED = "AUTOPAR_TRAIN_STARTED"  # the variable by which such a rank knows


def run(options: Options) -> int:
    """Follow the options; the exit status. What stands in the way is told in a line, without a traceback."""
    try:
        status = _follow(options)
    except AutoparError as error:
        text = str(error)
        print(text if text.startswith("autopar:") else f"autopar: {text}", file=sys.stderr)
        status = REFUSED
    return status + TOLD if status and STARTED in os.environ else status


def _follow(options: Options) -> int:
    checked = check(options, launched())
    if checked.processes and checked.launched is None:
        return _start(checked)
    if checked.device.type == "cuda":
        torch.cuda.set_device(checked.device)
    return _train(checked)


def _start(checked: Checked) -> int:
    """The same command again, once for each rank."""
    from autopar.runtime.launch import launch

    options = replace(checked.options, device=checked.device.type)
    if not isinstance(checked.plan, str):  # what is wrong with it is told here, once
        shapes = {name: (options.batch, options.sequence) for name in _batch(checked, 0)}
        layouts_of(checked.plan, _model(checked, torch.device("meta")), checked.mesh, shapes)
    command = [sys.executable, "-m", "autopar", "train", *options.arguments()]
    endpoint = None if options.port is None else f"localhost:{options.port}"
    try:
        launch(command, checked.mesh.size, endpoint=endpoint, environment={STARTED: "1"})
    except LaunchError as error:
        if error.status - TOLD in (DIFFERENT, REFUSED):
            return error.status - TOLD
        if error.rank is None and error.status == 1:  # nothing was started
            raise
        print(error, file=sys.stderr)
        return error.status
    return EQUAL


def _train(checked: Checked) -> int:
    """Train on the mesh; then the first rank trains alone and compares, when the others have left."""
    first = checked.launched is None or checked.launched.rank == 0
    console = console_of(first)
    options = checked.options
    model = _model(checked)
    show_request(console, checked, sum(p.numel() for p in model.parameters()))
    example = _batch(checked, 0)
    parallel = autopar.parallelize(model, checked.mesh, checked.plan, example=example, timeout=options.timeout)
    show_decisions(console, parallel.reports, parallel.transfers)
    call, owner = (parallel, parallel) if checked.processes else (parallel.simulate, model)
    steps = _steps(checked, f"on {checked.mesh}", call, owner, console)
    if dist.is_initialized():
        dist.destroy_process_group()
    if not first:
        return EQUAL
    alone = _model(checked)
    wanted = _steps(checked, "on a single device", alone, alone, console)
    losses = Comparison([step.loss for step in steps], [step.loss for step in wanted])
    norms = Comparison([step.norm for step in steps], [step.norm for step in wanted])
    show_comparison(console, losses, norms, checked)
    return EQUAL if losses.within(checked.tolerance) and norms.within(checked.tolerance) else DIFFERENT


def _steps(checked: Checked, title: str, call: Callable[..., Any], owner: torch.nn.Module, console: Console) -> list[Step]:
    """All steps, seen while they are made."""
    o = checked.options
    batches = (_batch(checked, step) for step in range(o.steps))
    steps = train(call, owner.parameters(), batches, checked.lr)
    return list(show_steps(console, title, steps, o.steps, o.batch * o.sequence))


def _model(checked: Checked, device: torch.device | None = None) -> torch.nn.Module:
    o = checked.options
    return llama(checked.size, o.sequence, o.seed, checked.dtype, device or checked.device)


def _batch(checked: Checked, step: int) -> dict[str, torch.Tensor]:
    o = checked.options
    return checked.text.batch(o.seed, step, o.batch, o.sequence, checked.device)
