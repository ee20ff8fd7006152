"""Define the options of ``autopar plan``. ``autopar.cli.plan.run`` runs it."""

from __future__ import annotations

import typer

from autopar.cli.commands.option_table import OptionRow, command
from autopar.cli.commands.options import CALL, MODEL_ARGUMENT, MODELS, OPTIMIZER, OUTPUT, WHERE
from autopar.cli.plan.options import PlanOptions

PLAN = (
    "Find the cheapest plan of a model on a mesh of machines, or compare it with all presets. Nothing is computed, and "
    f"no device is needed.\n\n{MODELS}"
)

PLAN_EXAMPLES = """
[bold]Examples[/bold]

[cyan]autopar plan --compare[/cyan] — all presets and the search, for the tiny Llama on dp=2,tp=2

[cyan]autopar plan llama-3-8b --mesh dp=4,tp=2 --machine "NVIDIA H100 80GB HBM3" --sequence 2048 --html plan.html[/cyan]

[cyan]autopar plan LlamaForCausalLM --set hidden_size=256,num_hidden_layers=4 --devices 8 --optimizer adamw[/cyan]

[cyan]autopar plan model.py:MLP --inputs "x=f32[512,256]" --mesh a=8 --machine machine.json --save plan.json[/cyan]

[cyan]autopar plan model.py:MLP --inputs "x=f32[512,256]" --mesh a=8 --diff plan.json --explain up.weight[/cyan]

[bold]Exit status[/bold]

0: done.  1: the reader of the output closed it.  2: the options were refused, or no plan fits.
"""

QUESTIONS = (
    OptionRow("compare", "", "Print a table of all presets and the search; the cheapest is marked."),
    OptionRow("save", "FILE", "Write the searched plan to a file, which parallelize and --plan take.", False),
    OptionRow("diff", "FILE", "Print the values whose layouts differ in a saved plan.", False),
    OptionRow("explain", "NAME", "Print what each layout of a value would cost; may be repeated.", False),
    OptionRow("html", "FILE", "Write a page with the plan, which opens in a browser.", False),
)
OPTIONS = {"Plan": (*WHERE, *QUESTIONS), "What is planned": (*CALL, OPTIMIZER), **OUTPUT}


def _run(context: typer.Context) -> int:
    from autopar.cli.plan.run import run

    return run(PlanOptions(**context.params))


plan = command(PlanOptions(), OPTIONS, _run, MODEL_ARGUMENT)
