"""Define the options of ``autopar calibrate``. ``autopar.cli.calibrate`` runs it."""

from __future__ import annotations

import typer

from autopar.cli.calibrate import DEVICES, RANKS, Calibrating
from autopar.cli.commands.option_table import OptionRow, command
from autopar.cli.commands.options import OUTPUT

CALIBRATE = (
    "Measure the ops and collectives of this machine, print the figures, and write a machine file.\n\n"
    "All processes work at the same time, as they do in a training. The file is for machine= of parallelize, and for "
    "--machine of autopar plan."
)

CALIBRATE_EXAMPLES = """
[bold]Examples[/bold]

[cyan]autopar calibrate --output machine.json[/cyan] — two processes, with a thread each

[cyan]torchrun --nproc-per-node 4 -m autopar calibrate -o machine.json[/cyan] — in processes that torchrun starts

[bold]Exit status[/bold]

0: done.  2: the options were refused.
"""

OPTIONS = {
    "Calibration": (
        OptionRow("output", "FILE", "The machine file to write.", "none: the figures are printed only", short="o"),
        OptionRow("ranks", "NUMBER", "The processes that measure; one measures ops only.",
                  f"{RANKS}, or a process for each GPU; under torchrun those of the job"),
        OptionRow("device", "NAME", f"The device of the processes: {', '.join(DEVICES)}."),
        OptionRow("rounds", "NUMBER", "How often each size is measured."),
        OptionRow("sizes", "BYTES,…", "The sizes of the collectives."),
        OptionRow("name", "NAME", "The name of the machine in reports.", "the device and its processes"),
    ),
    **OUTPUT,
}  # fmt: skip


def _run(context: typer.Context) -> int:
    from autopar.cli.calibrate import run

    return run(Calibrating(**context.params))


calibrate = command(Calibrating(), OPTIONS, _run)
