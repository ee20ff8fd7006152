"""Define the options of ``autopar schedule``. ``autopar.cli.schedule`` runs it."""

from __future__ import annotations

import typer

from autopar.cli.commands.option_table import OptionRow, command, parameter
from autopar.cli.commands.options import OUTPUT, of
from autopar.cli.schedule import BATCHES, RANKS, Request
from autopar.pipeline.policies import POLICIES

SCHEDULE = (
    "Make a pipeline schedule, or load one; verify it, simulate it, and print, draw or save it.\n\n"
    f"Policies: {', '.join(POLICIES)}; torch's names for them work too. With [bold]optimised[/bold], autopar searches "
    f"for the best order for these times "
    "within a memory limit."
)

SCHEDULE_EXAMPLES = """
[bold]Examples[/bold]

[cyan]autopar schedule zb-h1 --ranks 8 --batches 32 --draw zb-h1.svg[/cyan]

[cyan]autopar schedule interleaved --chunks 3 --forward 6 --backward 6 --weight 3 --transfer 0.6[/cyan]

[cyan]autopar schedule optimised --forward 2,2,2,3 --backward 2,2,2,3 --transfer 0.2 --limit 4[/cyan]

[cyan]autopar schedule optimised --ranks 8 --batches 24 --for-weights 0.43 --limit 16 --objective span[/cyan]

[cyan]autopar schedule torchs.csv --trace torchs.trace.json[/cyan] — a schedule of torch's, verified

[bold]Exit status[/bold]

0: done.  1: the reader of the output closed it.  2: the options were refused, or the schedule is wrong.
"""

OPTIONS = {
    "Pipeline": (
        OptionRow("ranks", "NUMBER", "The ranks of the pipeline.", f"{RANKS}, or what the file says"),
        OptionRow("batches", "NUMBER", "Micro-batches per step.", f"{BATCHES}, or as in the file"),
        OptionRow("chunks", "NUMBER", "Stages per rank.", "as in the policy"),
        OptionRow("recompute", "", "Each backward runs its forward again."),
        OptionRow("limit", "BYTES", "The memory limit of a rank, for optimised.", "no limit"),
        OptionRow(
            "objective", "NAME", "What optimised minimises: the makespan, or the longest span of a rank.", "makespan"
        ),
    ),
    "Times and sizes, in any unit": (
        OptionRow("forward", "TIME,…", "The time of a forward; one, or one for each stage."),
        OptionRow("backward", "TIME,…", "The time of the gradient of the input."),
        OptionRow("weight", "TIME,…", "The time of the gradient of the weights."),
        OptionRow("transfer", "TIME,…", "The time of a message; one, or one for each pair of neighbours."),
        OptionRow("rendezvous", "", "A message waits for both its ranks, as on a CPU."),
        OptionRow("overlap", "SHARE", "The share of the shorter one that is hidden where a slot has F and B: 0 to 1."),
        OptionRow("activation", "BYTES,…", "The memory that a micro-batch needs on a stage."),
        OptionRow(
            "for_weights",
            "BYTES,…",
            "The part of --activation that is kept until the gradient of the weights.",
            "all of it",
        ),
        OptionRow("boundary", "BYTES,…", "The size of a message."),
    ),
    "Result": (
        OptionRow("down", "", "Print the table with time downwards."),
        OptionRow("events", "", "Print what each slot waits for and records."),
        OptionRow("draw", "FILE", "Draw the schedule: .svg, .png or .pdf."),
        OptionRow("trace", "FILE", "Write a trace for Perfetto."),
        OptionRow("save", "FILE", "Save the schedule: .json, or .csv for torch."),
    ),
    **OUTPUT,
}

SOURCE = typer.Argument(
    metavar="POLICY|FILE",
    help="A policy, or a saved file: .json, or .csv in torch's format.",
    autocompletion=of((*POLICIES,)),
)


def _run(context: typer.Context) -> int:
    from autopar.cli.schedule import run

    return run(Request(**context.params))


schedule = command(Request(), OPTIONS, _run, parameter("source", str, SOURCE, Request.source))
