"""Define the options of ``autopar verify``. ``autopar.cli.plan.verify`` runs it."""

from __future__ import annotations

import typer

from autopar.cli.commands.option_table import OptionRow, command
from autopar.cli.commands.options import MODEL_ARGUMENT, MODELS, OUTPUT, PLANNED
from autopar.cli.commands.stages import STAGES
from autopar.cli.plan.options import VerifyOptions
from autopar.cli.train.options import RECOMPUTED

VERIFY = (
    "Check a model on a mesh before anything runs: the programs of all levels, those of each class of ranks, and the "
    "communication of all ranks, which must meet in one order and come to an end. With [bold]--run[/bold], all ranks "
    "of a small model are simulated, and the numbers compared with a single device. With [bold]--rank[/bold], a "
    "training step runs here as one rank of a large job, without the others: its memory is measured beside what is "
    f"predicted, its time by classes of ops, and its communication listed.\n\n{MODELS}"
)
VERIFY_EXAMPLES = """
[bold]Examples[/bold]

[cyan]autopar verify llama-3-8b --mesh dp=8,tp=8 --plan megatron --sequence 2048[/cyan]

[cyan]autopar verify model.py:make --mesh dp=2,tp=2 --run[/cyan]

[cyan]autopar verify llama-3-8b --set hidden_size=64,num_hidden_layers=2,vocab_size=256 --run[/cyan]

[cyan]autopar verify llama-3-8b --set num_hidden_layers=2 --mesh dp=512,tp=8 --plan megatron --rank 17 --zero 3[/cyan]

[cyan]autopar verify llama-3-8b --set num_hidden_layers=8 --mesh pp=4,dp=64,tp=8 --plan megatron --rank 17[/cyan]

[bold]Exit status[/bold]

0: all is right.  1: a program, the communication, a number or the memory is wrong.  2: the options were refused.
"""
OPTIONS = {
    **PLANNED,
    "Verify": (
        OptionRow("run", "", "Simulate all ranks in float64, and compare with a single device."),
        OptionRow("rank", "RANK", "Run a training step here as this rank, without the others.", False),
    ),
    "Training step, with --rank, --optimizer or an axis pp": (
        OptionRow("microbatches", "NUMBER", "Micro-batches per batch, with gradient accumulation."),
        OptionRow("recompute", "WHAT", f"Recompute in the backward: {', '.join(RECOMPUTED)}, or a glob over modules."),
        OptionRow("zero", "STAGE", "Shard over the data axis, as autopar train does."),
        *STAGES,
    ),
    **OUTPUT,
}


def _run(context: typer.Context) -> int:
    from autopar.cli.plan.verify import verify

    return verify(VerifyOptions(**context.params))


verify = command(VerifyOptions(), OPTIONS, _run, MODEL_ARGUMENT)
