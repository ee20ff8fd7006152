"""Define the options of ``autopar plan``. ``autopar.cli.plan`` runs it."""

from __future__ import annotations

import typer

from autopar.cli.commands.option_table import OptionRow, command, parameter
from autopar.cli.plan.options import PlanOptions
from autopar.cli.train.optimizers import OPTIMIZERS
from autopar.cli.train.sizes import SIZES
from autopar.plan.presets import PRESETS

PLAN = (
    "Find the cheapest plan of a model on a mesh of machines, or compare it with all presets. Nothing is computed, and "
    "no device is needed.\n\n"
    f"The model is a small Llama ({', '.join(SIZES)}), or what a function of yours returns: a model, which may be on "
    "the meta device, and the arguments of one call."
)

PLAN_EXAMPLES = """
[bold]Examples[/bold]

[cyan]autopar plan --compare[/cyan] — all presets and the search, for the tiny Llama on dp=2,tp=2

[cyan]autopar plan large --mesh dp=4,tp=2 --machine "NVIDIA H100 80GB HBM3" --compare --optimizer adamw[/cyan]

[cyan]autopar plan model.py:make --mesh a=8 --machine machine.json --save plan.json[/cyan]

[bold]Exit status[/bold]

0: done.  1: the reader of the output closed it.  2: the options were refused, or no plan fits.
"""

OPTIONS = {
    "Plan": (
        OptionRow("mesh", "AXIS=SIZE,…", "Axes and their sizes; there is one rank for each point of the grid."),
        OptionRow(
            "plan",
            "PRESET|search|FILE",
            f"{', '.join(PRESETS)}; search finds the cheapest plan; or a JSON file of globs, or of a saved plan.",
        ),
        OptionRow("compare", "", "Print a table of all presets and the search; the cheapest is marked."),
        OptionRow(
            "machine",
            "NAME|FILE",
            "The machine whose seconds are added up: its name, as torch prints that of a device, or a file that "
            "autopar calibrate has written.",
            "this machine",
        ),
        OptionRow("memory", "BYTES", "The most bytes that a rank may use, such as 80e9.", "what the machine has"),
        OptionRow("time_limit", "SECONDS", "When a search ends with the best plan so far."),
        OptionRow("save", "FILE", "Write the searched plan to a file, which parallelize and --plan take.", False),
    ),
    "What is planned": (
        OptionRow(
            "optimizer",
            "NAME",
            f"Plan a whole training step with this optimizer: {', '.join(OPTIMIZERS)}.",
            "a call with its backward",
        ),
        OptionRow("batch", "NUMBER", "Sequences of the Llama's batch."),
        OptionRow("sequence", "NUMBER", "Tokens of each."),
    ),
}

MODEL = typer.Argument(metavar="MODEL", help=f"{', '.join(SIZES)}; or FILE.py:FUNCTION, package.module:FUNCTION.")


def _run(context: typer.Context) -> int:
    from autopar.cli.plan.run import run

    return run(PlanOptions(**context.params))


plan = command(PlanOptions(), OPTIONS, _run, parameter("model", str, MODEL, PlanOptions.model))
