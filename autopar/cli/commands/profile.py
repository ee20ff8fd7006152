"""Define the options of ``autopar profile step``. ``autopar.cli.profile`` runs it."""

from __future__ import annotations

from dataclasses import replace

import typer

from autopar.cli.commands.option_table import OptionRow, command
from autopar.cli.commands.options import CALL, MACHINE, MODEL_ARGUMENT, MODELS, OUTPUT
from autopar.cli.commands.stages import STAGES
from autopar.cli.profile import ProfileOptions
from autopar.cli.train.optimizers import OPTIMIZERS
from autopar.cli.train.options import AMPS, DEVICES, RECOMPUTED
from autopar.plan.presets import PRESETS

PROFILE = "Measure how long the ops and collectives of a model take on this machine."

STEP = (
    "Time each distinct call of a training step once, print the dearest beside the prices of a machine, and save all "
    "times. By them communication is scheduled.\n\n"
    "In one process, the ops of the first rank are timed, and collectives have prices. Under torchrun, with a process "
    "for each rank of the mesh, collectives are timed too, with all ranks at work.\n\n"
    f"{MODELS}"
)

STEP_EXAMPLES = """
[bold]Examples[/bold]

[cyan]autopar profile step --save step.json[/cyan] — the ops of the tiny Llama on dp=2,tp=2

[cyan]torchrun --nproc-per-node 4 -m autopar profile step --save step.json --interference[/cyan] — collectives too

[cyan]autopar profile step model.py:make --mesh dp=4 --zero 3 --optimizer sgd --save step.json[/cyan]

[bold]Exit status[/bold]

0: done.  1: the reader of the output closed it.  2: the options were refused.
"""

OPTIONS = {
    "Profile": (
        OptionRow("save", "FILE", "Write the times to a file.", "none: the times are printed only"),
        replace(MACHINE, help="The machine whose prices stand beside the times: its name, or a machine file."),
        OptionRow("device", "NAME", f"The device that is timed: {', '.join(DEVICES)}."),
        OptionRow("seconds", "SECONDS", "About how long each distinct call is timed."),
        OptionRow("interference", "", "Time also how much slower ops compute while a collective runs."),
    ),
    "Step": (
        OptionRow("mesh", "AXIS=SIZE,…", "Axes and their sizes; there is one rank for each point of the grid."),
        OptionRow(
            "plan",
            "PRESET|search|FILE",
            f"{', '.join(PRESETS)}; search finds the cheapest plan; or a JSON file of globs, or of a saved plan.",
            "megatron with an axis tp, else ddp",
        ),
        OptionRow("optimizer", "NAME", f"An optimizer of torch: {', '.join(OPTIMIZERS)}."),
        OptionRow("microbatches", "NUMBER", "Micro-batches per batch, with gradient accumulation."),
        *STAGES,
        OptionRow("amp", "POLICY", f"Mixed precision: {', '.join(AMPS)}."),
        OptionRow("recompute", "WHAT", f"Recompute in the backward: {', '.join(RECOMPUTED)}, or a glob over modules."),
        OptionRow("zero", "STAGE", "Shard over the data axis, as autopar train does."),
        OptionRow("clip_norm", "NUMBER", "Clip the norm of all gradients to this value.", "not clipped"),
    ),
    "Model": CALL,
    **OUTPUT,
}


def _run(context: typer.Context) -> int:
    from autopar.cli.profile import run

    return run(ProfileOptions(**context.params))


profiles = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help=PROFILE,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
profiles.command("step", help=STEP, epilog=STEP_EXAMPLES)(command(ProfileOptions(), OPTIONS, _run, MODEL_ARGUMENT))


@profiles.callback()
def profile() -> None:
    """Measure how long the ops and collectives of a model take on this machine."""
