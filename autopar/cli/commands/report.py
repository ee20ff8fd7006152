"""Define the options of ``autopar report`` and ``autopar page``. ``autopar.cli.plan.report`` runs them."""

from __future__ import annotations

import typer

from autopar.cli.commands.option_table import OptionRow, command
from autopar.cli.commands.options import MODEL_ARGUMENT, MODELS, OUTPUT, PLANNED
from autopar.cli.plan.options import PageOptions, PlannedOptions

REPORT = (
    "Print what was decided for a model on a mesh: the passes, the plan by module, the transfers with their bytes and "
    f"seconds, the memory of a rank by phase, and the schedule of communication.\n\n{MODELS}"
)
PAGE = f"Write a page with the plan of a model: one file, which opens in a browser without a network.\n\n{MODELS}"
STATUS = """
[bold]Exit status[/bold]

0: done.  1: the reader of the output closed it.  2: the options were refused, or no plan fits.
"""
REPORT_EXAMPLES = f"""
[bold]Examples[/bold]

[cyan]autopar report --plan megatron[/cyan] — the tiny Llama on dp=2,tp=2

[cyan]autopar report model.py:make --mesh dp=4 --plan ddp --optimizer adamw --json[/cyan]
{STATUS}"""
PAGE_EXAMPLES = f"""
[bold]Examples[/bold]

[cyan]autopar page llama-2-7b --sequence 2048 --mesh dp=4,tp=2 --machine "NVIDIA H100 80GB HBM3" -o plan.html[/cyan]
{STATUS}"""

PAGES = {"Page": (OptionRow("output", "FILE", "The file to write.", short="o"),)}


def _report(context: typer.Context) -> int:
    from autopar.cli.plan.report import report

    return report(PlannedOptions(**context.params))


def _page(context: typer.Context) -> int:
    from autopar.cli.plan.report import write_page

    return write_page(PageOptions(**context.params))


report = command(PlannedOptions(), {**PLANNED, **OUTPUT}, _report, MODEL_ARGUMENT)
page = command(PageOptions(), {**PAGES, **PLANNED, **OUTPUT}, _page, MODEL_ARGUMENT)
