"""Find the cheapest plan of a model and print it, or print a table of all presets and the search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from autopar.cli.plan.models import model_of
from autopar.cli.plan.options import PlanOptions
from autopar.cli.plan.rows import Planning, PlanRow, cheapest, row_of, rows_of
from autopar.cli.plan.status import DONE, REFUSED, status_of
from autopar.cli.stages import refuse_stages
from autopar.cli.train.check import mesh_of, one_of, plan_of
from autopar.cli.train.launched import launched
from autopar.cli.train.optimizers import OPTIMIZERS
from autopar.cli.train.refused import Refused
from autopar.cli.train.show import console_of
from autopar.costs.machine import Machine, machine_from, machine_of
from autopar.model.given_plan import check_mesh
from autopar.plan.plan import SEARCH, Plan
from autopar.plan.presets import PRESETS
from autopar.search.certificate import at_most, bytes_text
from autopar.search.solutions.solution import Solution

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def run(options: PlanOptions) -> int:
    """Run with the options and return the exit status. An error is printed as one line, without a traceback."""
    return status_of(partial(_follow, options), options.model)


def _follow(options: PlanOptions) -> int:
    plan = plan_of(options.plan)
    planning = _planning(options, plan)
    console = console_of(True)
    _show_request(console, options, planning)
    if isinstance(plan, Solution):
        _show_machine(console, options, planning, plan)
    if not options.compare:
        row = row_of(options.plan, plan, planning)
        _show_plan(console, row)
        rows = [row]
    else:
        rows = rows_of((*PRESETS, SEARCH), planning)
        _show_rows(console, rows)
    if options.save is not None:
        found = next((row.solution for row in rows if row.solution is not None), None)
        if found is None and planning.mesh.size == 1:
            raise Refused(
                f"--save {options.save} writes a searched plan, and on one rank there is nothing to search; use a "
                f"--mesh of several ranks"
            )
        if found is None:
            raise Refused(f"--save {options.save} writes a searched plan, and none was found; add --plan search")
        found.save(options.save)
        console.print(
            f"{options.save} has the searched plan; parallelize(model, mesh, {options.save!r}) takes it", soft_wrap=True
        )
    return DONE if cheapest(rows) is not None else REFUSED


def _planning(options: PlanOptions, plan: Plan | Solution) -> Planning:
    """Check the options; ``Refused`` names the option and the remedy."""
    if launched() is not None:
        raise Refused("autopar plan runs in one process, but RANK and WORLD_SIZE are set; start it without torchrun")
    for name in ("batch", "sequence"):
        if getattr(options, name) < 1:
            raise Refused(f"--{name} {getattr(options, name)} must be at least 1")
    if options.memory is not None and not options.memory > 0:
        raise Refused(f"--memory {options.memory:g} must be above 0, in bytes, such as 80e9")
    if not 0 < options.time_limit < math.inf:
        raise Refused(f"--time-limit {options.time_limit:g} must be above 0, in seconds")
    if options.optimizer is not None:
        one_of("optimizer", options.optimizer, OPTIMIZERS)
    if options.compare and options.plan != PlanOptions.plan:
        raise Refused(f"--compare has all presets and the search; leave --plan {options.plan} out")
    if options.save is not None and not Path(options.save).parent.is_dir():
        raise Refused(f"there is no folder {Path(options.save).parent} for --save {options.save}; make it first")
    mesh, machine = mesh_of(options.mesh), machine_for(options.machine, plan)
    refuse_stages(mesh, "autopar plan")
    if isinstance(plan, Solution):
        check_mesh(plan, mesh)
    model, example = model_of(options.model, options.batch, options.sequence)
    return Planning(model, example, mesh, machine, options.memory, options.time_limit, options.optimizer)


def machine_for(given: str | None, plan: Plan | Solution) -> Machine:
    """Return the machine of ``--machine``; by default that of a searched plan, or of this computer."""
    if given is None and isinstance(plan, Solution):
        return plan.machine
    if given is None:
        return machine_of(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    try:
        return machine_from(given)
    except ValueError as error:
        raise Refused(f"--machine {given}: {error}") from None


# -- what it prints ----------------------------------------------------------------------------------------------------


def _show_request(console: Console, options: PlanOptions, planning: Planning) -> None:
    parameters = sum(parameter.numel() for parameter in planning.model.parameters())
    what = f"a training step with {options.optimizer}" if options.optimizer else "a call with its backward"
    limit = "no limit of memory" if planning.limit is None else f"within {bytes_text(planning.limit)} a rank"
    console.print(
        f"{options.model}: {parameters:,} parameters, {what}\nmesh {planning.mesh} of {planning.machine.name}, {limit}",
        soft_wrap=True,
    )
    if planning.machine.note:
        console.print(planning.machine.note, soft_wrap=True)


def _show_machine(console: Console, options: PlanOptions, planning: Planning, plan: Solution) -> None:
    """Say which machine a saved plan brings, or that it is priced on another one."""
    if options.machine is None:
        said = f"{options.plan} brings the machine {plan.machine.name}; --machine prices the plan on another"
    else:
        said = f"{options.plan} was searched for {plan.machine.name}, and is priced on {planning.machine.name}"
    console.print(said, soft_wrap=True)


def _show_plan(console: Console, row: PlanRow) -> None:
    assert row.nanoseconds is not None
    for report in row.reports or ():
        for note in report.notes[:-1] if report.name == "search" else report.notes:
            console.print(f"{report.name}: {note}", soft_wrap=True)
    console.print(f"\n{row.solution}" if row.solution is not None else "", soft_wrap=True, end="")
    fits = "" if row.fits else ", more than there is"
    console.print(
        f"\n{row.name}: {time_text(row.nanoseconds)} a step, a rank receives {bytes_text(row.received)} and needs "
        f"{bytes_text(row.memory)}{fits}",
        soft_wrap=True,
    )


def _show_rows(console: Console, rows: Sequence[PlanRow]) -> None:
    """Print a table with a row for each plan; the cheapest is marked."""
    right = (Column(name, justify="right", no_wrap=True) for name in ("a step", "of best", "received", "memory"))
    table = Table(
        Column("plan", no_wrap=True), *right, "", box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False,
        show_edge=False, header_style="bold",
    )  # fmt: skip
    best = cheapest(rows)
    for row in rows:
        if row.nanoseconds is None:
            table.add_row(row.name, "–", "–", "–", "–", Text(row.why))
            continue
        ratio = "" if best is None or not best.nanoseconds else f"{row.nanoseconds / best.nanoseconds:.2f}"
        figures = time_text(row.nanoseconds), ratio, bytes_text(row.received), bytes_text(row.memory)
        table.add_row(row.name, *figures, Text(_remark(row, best)), style="green" if row is best else None)
    console.print()
    console.print(table)
    for row in rows:
        if row.solution is not None:
            console.print(f"\n{row.name}: {row.solution.certificate}", soft_wrap=True)


def _remark(row: PlanRow, best: PlanRow | None) -> str:
    said = ["← cheapest"] if row is best else []
    if not row.fits:
        said.append("does not fit")
    if row.solution is not None:
        bound, gap = time_text(row.solution.least), row.solution.gap
        proof = f"proven: {row.solution.proof}"
        said.append(proof if row.solution.exact else f"gap {at_most(gap)} above the bound {bound}")
    return "; ".join(said)


def time_text(nanoseconds: float) -> str:
    """Return a time with its unit: ``1.134 ms``."""
    seconds = nanoseconds / 1e9
    scale, unit = next((row for row in UNITS if seconds >= row[0]), UNITS[-1])
    return f"{seconds / scale:,.3f} {unit}"
