"""Define the options of ``autopar train``. ``autopar.cli.train`` runs it."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from autopar.cli.train.optimizers import OPTIMIZERS
from autopar.cli.train.options import AMPS, DEVICES, DTYPES, LOSS_SCALE, RECOMPUTED, TrainOptions, options_of
from autopar.cli.train.presets import TRAININGS
from autopar.cli.train.sizes import SIZES

DEFAULT = TrainOptions()
MESH, TRAINING, STEP, CHECKPOINTS, COMPARISON = "Mesh", "Training", "Step", "Checkpoints", "Comparison"

WHAT = (
    "Train a small Llama on a mesh, and compare its losses with those of a single device.\n\n"
    "Shows which transfers autopar inserted and where, trains on the mesh, trains the same model with the same batches "
    "on one device, and fails unless the two curves are the same. Nothing is downloaded."
)

EXAMPLES = """
[bold]Examples[/bold]

[cyan]autopar train[/cyan] — four processes, data and tensor parallel

[cyan]autopar train --simulate --mesh dp=2,tp=4 --plan megatron+sp[/cyan] — eight ranks in this process

[cyan]autopar train --preset llama-fp16-o2 --checkpoint runs/a --resume[/cyan] — continues from the newest checkpoint

[cyan]autopar train --zero 1 --amp bf16-O1 --microbatches 4 --clip-norm 1 --warmup 10[/cyan]

[cyan]autopar train --mesh tp=2 --size small --steps 100 --text book.txt[/cyan]

[cyan]torchrun --nproc-per-node 4 -m autopar train --mesh dp=4[/cyan] — in processes that torchrun starts

[bold]Exit status[/bold]

0: the losses are the same.  1: they differ, are not finite, or a rank failed.  2: the options were refused.
"""


def train(
    context: typer.Context,
    preset: Annotated[
        str | None,
        Option(
            metavar="NAME",
            rich_help_panel=MESH,
            show_default=False,
            help="A named set of options; other options of the command line override it. "
            + "; ".join(f"{name}: {preset.what}" for name, preset in TRAININGS.items())
            + ".",
        ),
    ] = DEFAULT.preset,
    mesh: Annotated[
        str,
        Option(
            metavar="AXIS=SIZE,…",
            rich_help_panel=MESH,
            help="Axes and their sizes; there is one rank for each point of the grid.",
        ),
    ] = DEFAULT.mesh,
    plan: Annotated[
        str | None,
        Option(
            metavar="PRESET|FILE",
            rich_help_panel=MESH,
            help='ddp, megatron, megatron+sp, or a JSON file of globs: {"*.up_proj.weight": ["tp", null]}.',
            show_default="megatron with an axis tp, else ddp",
        ),
    ] = DEFAULT.plan,
    simulate: Annotated[
        bool,
        Option(
            "--simulate",
            metavar="",
            rich_help_panel=MESH,
            help="Run all ranks in this process, without a process group.",
        ),
    ] = DEFAULT.simulate,
    device: Annotated[
        str | None,
        Option(
            metavar="NAME",
            rich_help_panel=MESH,
            help=f"The device of the ranks: {', '.join(DEVICES)}.",
            show_default="cuda with a GPU for each rank, else cpu",
        ),
    ] = DEFAULT.device,
    timeout: Annotated[
        float, Option(metavar="SECONDS", rich_help_panel=MESH, help="End a job that makes no progress for this time.")
    ] = DEFAULT.timeout,
    port: Annotated[
        int | None,
        Option(
            metavar="NUMBER",
            rich_help_panel=MESH,
            help="The port of the processes' rendezvous.",
            show_default="a free port",
        ),
    ] = DEFAULT.port,
    size: Annotated[
        str, Option(metavar="NAME", rich_help_panel=TRAINING, help=f"The size of the Llama: {', '.join(SIZES)}.")
    ] = DEFAULT.size,
    text: Annotated[
        str | None,
        Option(
            metavar="FILE",
            rich_help_panel=TRAINING,
            help="The text to train on, read as bytes.",
            show_default="the sources of Python's standard library",
        ),
    ] = DEFAULT.text,
    steps: Annotated[
        int, Option(metavar="NUMBER", rich_help_panel=TRAINING, help="The number of updates of the weights.")
    ] = DEFAULT.steps,
    batch: Annotated[
        int, Option(metavar="NUMBER", rich_help_panel=TRAINING, help="Sequences per step, over all ranks.")
    ] = DEFAULT.batch,
    sequence: Annotated[
        int, Option(metavar="NUMBER", rich_help_panel=TRAINING, help="Bytes per sequence.")
    ] = DEFAULT.sequence,
    microbatches: Annotated[
        int, Option(metavar="NUMBER", rich_help_panel=STEP, help="Micro-batches per batch, with gradient accumulation.")
    ] = DEFAULT.microbatches,
    amp: Annotated[
        str,
        Option(
            metavar="POLICY",
            rich_help_panel=STEP,
            help=f"Mixed precision: {', '.join(AMPS)}. O1 is as torch.autocast, O2 has float32 master weights.",
        ),
    ] = DEFAULT.amp,
    loss_scale: Annotated[
        float | None,
        Option(
            metavar="NUMBER",
            rich_help_panel=STEP,
            help="With fp16, the first scale of the loss, which then adapts.",
            show_default=f"{LOSS_SCALE:g}",
        ),
    ] = DEFAULT.loss_scale,
    recompute: Annotated[
        str,
        Option(
            metavar="WHAT",
            rich_help_panel=STEP,
            help=f"Recompute in the backward instead of keeping: {', '.join(RECOMPUTED)}, or a glob over modules.",
        ),
    ] = DEFAULT.recompute,
    zero: Annotated[
        int,
        Option(
            metavar="STAGE",
            rich_help_panel=STEP,
            help="Shard over the data axis: 1 the optimizer's state, 2 also gradients, 3 also parameters.",
        ),
    ] = DEFAULT.zero,
    clip_norm: Annotated[
        float,
        Option(
            metavar="NUMBER",
            rich_help_panel=STEP,
            help="Clip the norm of all gradients to this value.",
            show_default="inf: not clipped",
        ),
    ] = DEFAULT.clip_norm,
    optimizer: Annotated[
        str, Option(metavar="NAME", rich_help_panel=STEP, help=f"An optimizer of torch: {', '.join(OPTIMIZERS)}.")
    ] = DEFAULT.optimizer,
    lr: Annotated[
        float | None,
        Option(metavar="NUMBER", rich_help_panel=STEP, help="Learning rate.", show_default="the rate of the size"),
    ] = DEFAULT.lr,
    warmup: Annotated[
        int,
        Option(
            metavar="STEPS",
            rich_help_panel=STEP,
            help="Steps in which the learning rate rises, before a cosine decay; 0: a constant rate.",
        ),
    ] = DEFAULT.warmup,
    weight_decay: Annotated[
        float, Option(metavar="NUMBER", rich_help_panel=STEP, help="The optimizer's weight decay.")
    ] = DEFAULT.weight_decay,
    checkpoint: Annotated[
        str | None,
        Option(
            metavar="FOLDER",
            rich_help_panel=CHECKPOINTS,
            help="The folder for checkpoints; the newest two are kept.",
            show_default=False,
        ),
    ] = DEFAULT.checkpoint,
    every: Annotated[
        int,
        Option(
            metavar="STEPS",
            rich_help_panel=CHECKPOINTS,
            help="Steps between two checkpoints; there is also one at the end.",
        ),
    ] = DEFAULT.every,
    resume: Annotated[
        bool,
        Option(
            "--resume",
            metavar="",
            rich_help_panel=CHECKPOINTS,
            help="Continue from the newest complete checkpoint, on any mesh and stage of ZeRO; start anew if there is "
            "none.",
        ),
    ] = DEFAULT.resume,
    dtype: Annotated[
        str,
        Option(
            metavar="NAME", rich_help_panel=TRAINING, help=f"The dtype of weights and gradients: {', '.join(DTYPES)}."
        ),
    ] = DEFAULT.dtype,
    seed: Annotated[
        int, Option(metavar="NUMBER", rich_help_panel=TRAINING, help="The seed of weights and batches.")
    ] = DEFAULT.seed,
    tolerance: Annotated[
        float | None,
        Option(
            metavar="NUMBER",
            rich_help_panel=COMPARISON,
            help="The largest accepted relative difference of two losses, and of two norms of gradients.",
            show_default=f"{', '.join(f'{tolerance.loss:g} for {name}' for name, (_, tolerance) in DTYPES.items())}; "
            f"{', '.join(f'{tolerance.loss:g} for {name}' for name, tolerance in AMPS.items() if tolerance)}; more "
            f"for norms in low precision",
        ),
    ] = DEFAULT.tolerance,
) -> None:
    """Train with these options; the exit status is 0 if the losses are the same."""
    from autopar.cli.train.run import run

    sources = {name: context.get_parameter_source(name) for name in context.params}
    explicit = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
    raise typer.Exit(run(options_of({name: context.params[name] for name in explicit})))
