"""Print a plan: what was asked, what was decided, its figures, and the table of all presets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from autopar.cli.output import Output
from autopar.cli.plan.options import PlannedOptions
from autopar.cli.plan.planning import Planned, Planning
from autopar.cli.plan.rows import PlanRow, cheapest
from autopar.ir.mesh import Mesh
from autopar.report.passes import PRICE, PassReport
from autopar.search.certificate import bytes_text
from autopar.search.solutions.solution import Solution

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def show_request(output: Output, options: PlannedOptions, planning: Planning) -> None:
    """Print the model, the mesh and the machine, and what was decided for the user before."""
    parameters = sum(parameter.numel() for parameter in planning.model.parameters())
    what = f"a training step with {planning.optimizer}" if planning.optimizer else "a call with its backward"
    limit = "no limit of memory" if planning.limit is None else f"within {bytes_text(planning.limit)} a rank"
    mesh = f"mesh {planning.mesh}" if isinstance(planning.mesh, Mesh) else f"{planning.mesh.count} devices"
    output.text.print(
        f"{options.model}: {parameters:,} parameters, {what}\n{mesh} of {planning.machine.name}, {limit}",
        soft_wrap=True,
    )
    for note in (planning.machine.note, *planning.notes):
        if note:
            output.notes.print(note, soft_wrap=True)


def show_machine(output: Output, options: PlannedOptions, planning: Planning, plan: Solution) -> None:
    """Say which machine a saved plan brings, or that it is priced on another one."""
    if options.machine is None:
        said = f"{options.plan} brings the machine {plan.machine.name}; --machine prices the plan on another"
    else:
        said = f"{options.plan} was searched for {plan.machine.name}, and is priced on {planning.machine.name}"
    output.notes.print(said, soft_wrap=True)


def show_notes(console: Console, reports: Iterable[PassReport]) -> None:
    """Print what the passes decided for the user; the certificate follows with the plan."""
    for report in reports:
        for note in () if report.name == PRICE else report.notes:
            console.print(f"{report.name}: {note}", soft_wrap=True)


def show_plan(console: Console, row: PlanRow) -> None:
    """Print the figures of a plan: modules, transfers, and what a step takes; and the certificate of a search."""
    show_modules(console, row.found)
    show_transfers(console, row.found)
    if row.solution is not None:
        console.print(f"\n{certified(row.solution)}", soft_wrap=True, end="")
    assert row.nanoseconds is not None
    console.print(
        f"\n{row.name}: {time_text(row.nanoseconds)} {row.runs}, a rank receives {bytes_text(row.received)} and needs "
        f"{bytes_text(row.memory)}\n{both_prices(row.planned)}",
        soft_wrap=True,
    )


def both_prices(planned: Planned | None) -> str:
    """Return the sentence between the price of a plan and the time of its order; "" without a schedule."""
    made = None if planned is None else planned.communication
    if made is None:
        return ""
    return (
        f"that price adds up ops and transfers one after the other; in the order in which they run, where "
        f"communication hides behind computation and may slow it, it is {time_text(made.makespan * 1e9)}"
    )


def certified(solution: Solution) -> str:
    """Return the certificate of a searched plan, after how the step runs and where the plan is from."""
    return (
        str(replace(solution, modules=()))
        if solution.step is None
        else str(solution.step) + f"{solution.certificate}\n"
    )


def show_modules(console: Console, found: Mapping[str, Any]) -> None:
    """Print a table of the modules of the figures, those inside included in each."""
    right = (Column(name, justify="right", no_wrap=True) for name in ("ops", "transfers"))
    table = table_of(Column("module", overflow="fold"), "parameters → result", *right)
    for row in found["modules"]:
        layouts = [f"{name} {type}" for name, type in row["parameters"].items()]
        layouts += [f"→ {row['result']}"] if row["result"] else []
        times = (time_text(row[name] * 1e9) for name in ("seconds", "transfer_seconds"))
        table.add_row(Text(row["module"] or "(the model)"), Text("\n".join(layouts)), *times)
    console.print()
    console.print(table)


def show_transfers(console: Console, found: Mapping[str, Any]) -> None:
    """Print a table of the transfers of the figures: equal ones of equal modules are one row."""
    if not found["transfers"]:
        return
    right = (Column(name, justify="right", no_wrap=True) for name in ("times", "bytes", "seconds"))
    left = (Column(name, no_wrap=True) for name in ("transfer", "axis", "phase"))
    table = table_of(*left, *right, Column("module", overflow="fold"))
    for row in found["transfers"]:
        table.add_row(
            row["transfer"], row["axis"], row["phase"], str(row["times"]), bytes_text(row["bytes"]),
            time_text(row["seconds"] * 1e9), Text(row["module"] or "the root"),
        )  # fmt: skip
    console.print()
    console.print(table)


def show_rows(console: Console, rows: Sequence[PlanRow]) -> None:
    """Print a table with a row for each plan; the cheapest is marked."""
    right = (Column(name, justify="right", no_wrap=True) for name in (rows[0].runs, "of best", "received", "memory"))
    table = table_of(Column("plan", no_wrap=True), *right, "")
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
    said += [row.note] if row.note else []
    if not row.fits:
        said.append("does not fit")
    if row.solution is not None:
        bound = "" if row.solution.exact else f", bound {time_text(row.solution.least)}"
        said.append(f"proven: {row.solution.proof}{bound}")
    return "; ".join(said)


def table_of(*columns: Column | str) -> Table:
    """Return a table without a frame, as the command prints them."""
    return Table(
        *columns, box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="bold"
    )


def time_text(nanoseconds: float) -> str:
    """Return a time with its unit: ``1.134 ms``."""
    seconds = nanoseconds / 1e9
    scale, unit = next((row for row in UNITS if seconds >= row[0]), UNITS[-1])
    return f"{seconds / scale:,.3f} {unit}"
