"""Define the options of ``autopar schedule``. ``autopar.cli.schedule`` runs it."""

from __future__ import annotations

from typing import Annotated, cast

import typer
from typer import Option

from autopar.cli.schedule import BATCHES, RANKS, Request
from autopar.pipeline.bounds import Objective
from autopar.pipeline.policies import POLICIES

REQUEST = Request()
PIPELINE, TIMES, RESULT = "Pipeline", "Times and sizes, in any unit", "Result"

SCHEDULE = (
    "Make a pipeline schedule, or load one; verify it, simulate it, and print, draw or keep it.\n\n"
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

0: done.  2: the options were refused, or the schedule is wrong.
"""


def schedule(
    source: Annotated[
        str, typer.Argument(metavar="POLICY|FILE", help="A policy, or a saved file: .json, or .csv in torch's format.")
    ] = REQUEST.source,
    ranks: Annotated[
        int | None,
        Option(
            metavar="NUMBER",
            rich_help_panel=PIPELINE,
            help="Of the pipeline.",
            show_default=f"{RANKS}, or what the file says",
        ),
    ] = REQUEST.ranks,
    batches: Annotated[
        int | None,
        Option(
            metavar="NUMBER",
            rich_help_panel=PIPELINE,
            help="Micro-batches per step.",
            show_default=f"{BATCHES}, or as in the file",
        ),
    ] = REQUEST.batches,
    chunks: Annotated[
        int | None,
        Option(metavar="NUMBER", rich_help_panel=PIPELINE, help="Stages per rank.", show_default="as in the policy"),
    ] = REQUEST.chunks,
    recompute: Annotated[
        bool, Option("--recompute", metavar="", rich_help_panel=PIPELINE, help="Each backward runs its forward again.")
    ] = REQUEST.recompute,
    limit: Annotated[
        float | None,
        Option(
            metavar="BYTES",
            rich_help_panel=PIPELINE,
            help="The memory limit of a rank, for optimised.",
            show_default="no limit",
        ),
    ] = REQUEST.limit,
    objective: Annotated[
        str,
        Option(
            metavar="NAME",
            rich_help_panel=PIPELINE,
            help="What optimised minimises: the makespan, or the longest span of a rank.",
            show_default="makespan",
        ),
    ] = REQUEST.objective,
    forward: Annotated[
        str, Option(metavar="TIME,…", rich_help_panel=TIMES, help="The time of a forward; one, or one for each stage.")
    ] = REQUEST.forward,
    backward: Annotated[
        str, Option(metavar="TIME,…", rich_help_panel=TIMES, help="The time of the gradient of the input.")
    ] = REQUEST.backward,
    weight: Annotated[
        str, Option(metavar="TIME,…", rich_help_panel=TIMES, help="The time of the gradient of the weights.")
    ] = REQUEST.weight,
    transfer: Annotated[
        str,
        Option(
            metavar="TIME,…",
            rich_help_panel=TIMES,
            help="The time of a message; one, or one for each pair of neighbours.",
        ),
    ] = REQUEST.transfer,
    activation: Annotated[
        str, Option(metavar="BYTES,…", rich_help_panel=TIMES, help="The memory that a micro-batch needs on a stage.")
    ] = REQUEST.activation,
    for_weights: Annotated[
        str | None,
        Option(
            metavar="BYTES,…",
            rich_help_panel=TIMES,
            help="The part of it that the gradient of the weights needs.",
            show_default="all of it",
        ),
    ] = REQUEST.for_weights,
    boundary: Annotated[
        str, Option(metavar="BYTES,…", rich_help_panel=TIMES, help="The size of a message.")
    ] = REQUEST.boundary,
    down: Annotated[
        bool, Option("--down", metavar="", rich_help_panel=RESULT, help="Print the table with time downwards.")
    ] = REQUEST.down,
    events: Annotated[
        bool, Option("--events", metavar="", rich_help_panel=RESULT, help="Print what each slot waits for and records.")
    ] = REQUEST.events,
    draw: Annotated[
        str | None, Option(metavar="FILE", rich_help_panel=RESULT, help="Draw the schedule: .svg, .png or .pdf.")
    ] = REQUEST.draw,
    trace: Annotated[
        str | None, Option(metavar="FILE", rich_help_panel=RESULT, help="Write a trace for Perfetto.")
    ] = REQUEST.trace,
    save: Annotated[
        str | None, Option(metavar="FILE", rich_help_panel=RESULT, help="Save the schedule: .json, or .csv for torch.")
    ] = REQUEST.save,
) -> None:
    """Run the options."""
    from autopar.cli.schedule import run

    raise typer.Exit(run(Request(
        source=source, ranks=ranks, batches=batches, chunks=chunks, recompute=recompute, limit=limit,
        objective=cast(Objective, objective), forward=forward, backward=backward, weight=weight, transfer=transfer,
        activation=activation, for_weights=for_weights, boundary=boundary, down=down, events=events, draw=draw,
        trace=trace, save=save,
    )))  # fmt: skip
