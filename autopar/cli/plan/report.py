"""Run ``autopar report`` and ``autopar page``: say what was decided for a model, as text or as a page."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from autopar.cli.files import check_writable
from autopar.cli.output import output_of
from autopar.cli.plan.options import PageOptions, PlannedOptions
from autopar.cli.plan.planning import Planned, planning_of
from autopar.cli.plan.show import both_prices, certified, show_modules, show_request, show_transfers, time_text
from autopar.cli.status import DONE, status_of
from autopar.parallel import Parallel
from autopar.report.memory import MemoryReport, memory_of
from autopar.report.progress import doing
from autopar.search.certificate import bytes_text
from autopar.search.solutions.solution import Solution
from autopar.step.reports.memory import StepMemory


def report(options: PlannedOptions) -> int:
    """Print what was decided: passes, transfers, memory, communication. Returns the exit status."""
    return status_of(partial(_report, options), options.model)


def write_page(options: PageOptions) -> int:
    """Write the page of a plan. Returns the exit status."""
    return status_of(partial(_write_page, options), options.model)


def _report(options: PlannedOptions) -> int:
    output = output_of(options)
    planning, plan = planning_of(options, "autopar report")
    show_request(output, options, planning)
    planned = planning.placed(plan)
    found = planned.figures(planning.machine)
    memory = _memory(planned)
    say = partial(output.text.print, soft_wrap=True)
    say(f"\n{planned.reports}", end="")
    show_modules(output.text, found)
    show_transfers(output.text, found)
    if isinstance(planned.solution, Solution):
        say(f"\n{certified(planned.solution)}", end="")
    say(f"\n{memory}", end="")
    say(f"\n{planned.communication}", end="")
    bound = "" if found["bound"] is None else f", the bound is {time_text(found['bound'] * 1e9)}"
    price = time_text(found["seconds"] * 1e9)
    say(f"\n{planning.runs} takes {price}{bound}; a rank needs {bytes_text(memory.peak)}\n{both_prices(planned)}")
    passes = [
        {"pass": row.name, "seconds": row.ms / 1e3, "inserted": row.inserted, "removed": row.removed,
         "commits": row.commits, "bytes": row.bytes, "notes": list(row.notes)}
        for row in planned.reports
    ]  # fmt: skip
    output.give({**found, "passes": passes, "notes": list(planning.notes)})
    return DONE


def _write_page(options: PageOptions) -> int:
    check_writable("--output", options.output)
    output = output_of(options)
    planning, plan = planning_of(options, "autopar page")
    show_request(output, options, planning)
    planned = planning.placed(plan)
    with doing(f"write {options.output}"):
        planned.page(options.output, machine=planning.machine)
    size = bytes_text(Path(options.output).stat().st_size)
    output.notes.print(f"{options.output} has the page, {size}; it opens in a browser", soft_wrap=True)
    output.give({**planned.figures(planning.machine), "page": options.output})
    return DONE


def _memory(planned: Planned) -> MemoryReport | StepMemory:
    """Return the memory of the first rank by phase."""
    return memory_of(planned.local(0)) if isinstance(planned, Parallel) else planned.memory()
