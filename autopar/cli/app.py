"""Define the command ``autopar``: its options and their help. ``autopar.cli.train`` and its neighbours run it."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option
from typer.core import TyperGroup

import autopar
from autopar.cli.schedule import BATCHES, RANKS, Request
from autopar.cli.train.optimizers import OPTIMIZERS
from autopar.cli.train.options import AMPS, DEVICES, DTYPES, LOSS_SCALE, RECOMPUTED, TrainOptions, options_of
from autopar.cli.train.presets import TRAININGS
from autopar.cli.train.sizes import SIZES
from autopar.pipeline.policies import POLICIES

DEFAULT = TrainOptions()
REQUEST = Request()

app = typer.Typer(
    help="An ordinary PyTorch model on a mesh of devices, with the same numbers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

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

MESH, TRAINING, STEP, CHECKPOINTS, COMPARISON = "Mesh", "Training", "Step", "Checkpoints", "Comparison"
PIPELINE, TIMES, RESULT = "Pipeline", "Times and sizes, in any unit", "Result"

SCHEDULE = (
    "Make a pipeline schedule, or load one; verify it, simulate it, and print, draw or keep it.\n\n"
    f"Policies: {', '.join(POLICIES)}; torch's names for them work too. With [bold]optimised[/bold], autopar searches for the best order for these times "
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


CHECKPOINT = "Show checkpoints, or convert them from and to torch.distributed.checkpoint (DCP), as FSDP2 and torchtitan use it."

CHECKPOINT_EXAMPLES = """
[bold]Examples[/bold]

[cyan]autopar checkpoint runs/a[/cyan] — list a folder of checkpoints, and the contents of the newest

[cyan]autopar checkpoint runs/a --verify[/cyan] — read all files of the newest, and compare their checksums

[cyan]autopar checkpoint import outputs/checkpoint/step-100 runs/b --allow-pickle[/cyan]

[cyan]autopar checkpoint export runs/a outputs/checkpoint/step-200 --torchtitan[/cyan]

[bold]Exit status[/bold]

0: done.  1: the reader of the output closed it.  2: the options were refused, or a checkpoint is damaged.
"""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autopar {autopar.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, Option("--version", metavar="", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """An ordinary PyTorch model on a mesh of devices, with the same numbers."""


@app.command(help=WHAT, epilog=EXAMPLES)
def train(
    context: typer.Context,
    preset: Annotated[str | None, Option(
        metavar="NAME", rich_help_panel=MESH, show_default=False,
        help="A named set of options; other options of the command line override it. " + "; ".join(f"{name}: {preset.what}" for name, preset in TRAININGS.items()) + ".",
    )] = DEFAULT.preset,
    mesh: Annotated[str, Option(
        metavar="AXIS=SIZE,…", rich_help_panel=MESH, help="Axes and their sizes; there is one rank for each point of the grid.",
    )] = DEFAULT.mesh,
    plan: Annotated[str | None, Option(
        metavar="PRESET|FILE", rich_help_panel=MESH,
        help='ddp, megatron, megatron+sp, or a JSON file of globs: {"*.up_proj.weight": ["tp", null]}.',
        show_default="megatron with an axis tp, else ddp",
    )] = DEFAULT.plan,
    simulate: Annotated[bool, Option(
        "--simulate", metavar="", rich_help_panel=MESH, help="Run all ranks in this process, without a process group.",
    )] = DEFAULT.simulate,
    device: Annotated[str | None, Option(
        metavar="NAME", rich_help_panel=MESH, help=f"The device of the ranks: {', '.join(DEVICES)}.",
        show_default="cuda with a GPU for each rank, else cpu",
    )] = DEFAULT.device,
    timeout: Annotated[float, Option(
        metavar="SECONDS", rich_help_panel=MESH, help="End a job that makes no progress for this time.",
    )] = DEFAULT.timeout,
    port: Annotated[int | None, Option(
        metavar="NUMBER", rich_help_panel=MESH, help="The port of the processes' rendezvous.", show_default="a free port",
    )] = DEFAULT.port,
    size: Annotated[str, Option(
        metavar="NAME", rich_help_panel=TRAINING, help=f"The size of the Llama: {', '.join(SIZES)}.",
    )] = DEFAULT.size,
    text: Annotated[str | None, Option(
        metavar="FILE", rich_help_panel=TRAINING, help="The text to train on, read as bytes.",
        show_default="the sources of Python's standard library",
    )] = DEFAULT.text,
    steps: Annotated[int, Option(metavar="NUMBER", rich_help_panel=TRAINING, help="The number of updates of the weights.")] = DEFAULT.steps,
    batch: Annotated[int, Option(
        metavar="NUMBER", rich_help_panel=TRAINING, help="Sequences per step, over all ranks.",
    )] = DEFAULT.batch,
    sequence: Annotated[int, Option(metavar="NUMBER", rich_help_panel=TRAINING, help="Bytes per sequence.")] = DEFAULT.sequence,
    microbatches: Annotated[int, Option(
        metavar="NUMBER", rich_help_panel=STEP, help="Micro-batches per batch, with gradient accumulation.",
    )] = DEFAULT.microbatches,
    amp: Annotated[str, Option(
        metavar="POLICY", rich_help_panel=STEP, help=f"Mixed precision: {', '.join(AMPS)}. O1 is as torch.autocast, O2 has float32 master weights.",
    )] = DEFAULT.amp,
    loss_scale: Annotated[float | None, Option(
        metavar="NUMBER", rich_help_panel=STEP, help="With fp16, the first scale of the loss, which then adapts.", show_default=f"{LOSS_SCALE:g}",
    )] = DEFAULT.loss_scale,
    recompute: Annotated[str, Option(
        metavar="WHAT", rich_help_panel=STEP, help=f"Recompute in the backward instead of keeping: {', '.join(RECOMPUTED)}, or a glob over modules.",
    )] = DEFAULT.recompute,
    zero: Annotated[int, Option(
        metavar="STAGE", rich_help_panel=STEP, help="Shard over the data axis: 1 the optimizer's state, 2 also gradients, 3 also parameters.",
    )] = DEFAULT.zero,
    clip_norm: Annotated[float, Option(
        metavar="NUMBER", rich_help_panel=STEP, help="Clip the norm of all gradients to this value.", show_default="inf: not clipped",
    )] = DEFAULT.clip_norm,
    optimizer: Annotated[str, Option(metavar="NAME", rich_help_panel=STEP, help=f"An optimizer of torch: {', '.join(OPTIMIZERS)}.")] = DEFAULT.optimizer,
    lr: Annotated[float | None, Option(
        metavar="NUMBER", rich_help_panel=STEP, help="Learning rate.", show_default="the rate of the size",
    )] = DEFAULT.lr,
    warmup: Annotated[int, Option(
        metavar="STEPS", rich_help_panel=STEP, help="Steps in which the learning rate rises, before a cosine decay; 0: a constant rate.",
    )] = DEFAULT.warmup,
    weight_decay: Annotated[float, Option(metavar="NUMBER", rich_help_panel=STEP, help="The optimizer's weight decay.")] = DEFAULT.weight_decay,
    checkpoint: Annotated[str | None, Option(
        metavar="FOLDER", rich_help_panel=CHECKPOINTS, help="The folder for checkpoints; the newest two are kept.", show_default=False,
    )] = DEFAULT.checkpoint,
    every: Annotated[int, Option(
        metavar="STEPS", rich_help_panel=CHECKPOINTS, help="Steps between two checkpoints; there is also one at the end.",
    )] = DEFAULT.every,
    resume: Annotated[bool, Option(
        "--resume", metavar="", rich_help_panel=CHECKPOINTS,
        help="Continue from the newest complete checkpoint, on any mesh and stage of ZeRO; start anew if there is none.",
    )] = DEFAULT.resume,
    dtype: Annotated[str, Option(
        metavar="NAME", rich_help_panel=TRAINING, help=f"The dtype of weights and gradients: {', '.join(DTYPES)}.",
    )] = DEFAULT.dtype,
    seed: Annotated[int, Option(metavar="NUMBER", rich_help_panel=TRAINING, help="The seed of weights and batches.")] = DEFAULT.seed,
    tolerance: Annotated[float | None, Option(
        metavar="NUMBER", rich_help_panel=COMPARISON, help="The largest accepted relative difference of two losses, and of two norms of gradients.",
        show_default=f"{', '.join(f'{tolerance.loss:g} for {name}' for name, (_, tolerance) in DTYPES.items())}; "
        f"{', '.join(f'{tolerance.loss:g} for {name}' for name, tolerance in AMPS.items() if tolerance)}; more for norms in low precision",
    )] = DEFAULT.tolerance,
) -> None:
    """Train with these options; the exit status is 0 if the losses are the same."""
    from autopar.cli.train.run import run

    explicit = [name for name in context.params if context.get_parameter_source(name).name != "DEFAULT"]
    raise typer.Exit(run(options_of({name: context.params[name] for name in explicit})))


@app.command(help=SCHEDULE, epilog=SCHEDULE_EXAMPLES)
def schedule(
    source: Annotated[str, typer.Argument(metavar="POLICY|FILE", help="A policy, or a saved file: .json, or .csv in torch's format.")] = REQUEST.source,
    ranks: Annotated[int | None, Option(
        metavar="NUMBER", rich_help_panel=PIPELINE, help="Of the pipeline.", show_default=f"{RANKS}, or what the file says",
    )] = REQUEST.ranks,
    batches: Annotated[int | None, Option(
        metavar="NUMBER", rich_help_panel=PIPELINE, help="Micro-batches per step.", show_default=f"{BATCHES}, or as in the file",
    )] = REQUEST.batches,
    chunks: Annotated[int | None, Option(
        metavar="NUMBER", rich_help_panel=PIPELINE, help="Stages per rank.", show_default="as in the policy",
    )] = REQUEST.chunks,
    recompute: Annotated[bool, Option("--recompute", metavar="", rich_help_panel=PIPELINE, help="Each backward runs its forward again.")] = REQUEST.recompute,
    limit: Annotated[float | None, Option(
        metavar="BYTES", rich_help_panel=PIPELINE, help="The memory limit of a rank, for optimised.", show_default="no limit",
    )] = REQUEST.limit,
    objective: Annotated[str, Option(
        metavar="NAME", rich_help_panel=PIPELINE, help="What optimised minimises: the makespan, or the longest span of a rank.",
        show_default="makespan",
    )] = REQUEST.objective,
    forward: Annotated[str, Option(metavar="TIME,…", rich_help_panel=TIMES, help="The time of a forward; one, or one for each stage.")] = REQUEST.forward,
    backward: Annotated[str, Option(metavar="TIME,…", rich_help_panel=TIMES, help="The time of the gradient of the input.")] = REQUEST.backward,
    weight: Annotated[str, Option(metavar="TIME,…", rich_help_panel=TIMES, help="The time of the gradient of the weights.")] = REQUEST.weight,
    transfer: Annotated[str, Option(metavar="TIME,…", rich_help_panel=TIMES, help="The time of a message; one, or one for each pair of neighbours.")] = REQUEST.transfer,
    activation: Annotated[str, Option(metavar="BYTES,…", rich_help_panel=TIMES, help="The memory that a micro-batch needs on a stage.")] = REQUEST.activation,
    for_weights: Annotated[str | None, Option(
        metavar="BYTES,…", rich_help_panel=TIMES, help="The part of it that the gradient of the weights needs.", show_default="all of it",
    )] = REQUEST.for_weights,
    boundary: Annotated[str, Option(metavar="BYTES,…", rich_help_panel=TIMES, help="The size of a message.")] = REQUEST.boundary,
    down: Annotated[bool, Option("--down", metavar="", rich_help_panel=RESULT, help="Print the table with time downwards.")] = REQUEST.down,
    events: Annotated[bool, Option("--events", metavar="", rich_help_panel=RESULT, help="Print what each slot waits for and records.")] = REQUEST.events,
    draw: Annotated[str | None, Option(metavar="FILE", rich_help_panel=RESULT, help="Draw the schedule: .svg, .png or .pdf.")] = REQUEST.draw,
    trace: Annotated[str | None, Option(metavar="FILE", rich_help_panel=RESULT, help="Write a trace for Perfetto.")] = REQUEST.trace,
    save: Annotated[str | None, Option(metavar="FILE", rich_help_panel=RESULT, help="Save the schedule: .json, or .csv for torch.")] = REQUEST.save,
) -> None:
    """Run the options."""
    from autopar.cli.schedule import run

    raise typer.Exit(run(Request(
        source=source, ranks=ranks, batches=batches, chunks=chunks, recompute=recompute, limit=limit, objective=objective, forward=forward,
        backward=backward, weight=weight, transfer=transfer, activation=activation, for_weights=for_weights, boundary=boundary, down=down, events=events, draw=draw, trace=trace, save=save,
    )))  # fmt: skip


class _Checkpoints(TyperGroup):
    """Makes ``autopar checkpoint FOLDER`` mean ``autopar checkpoint show FOLDER``."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["show", *args]
        return super().parse_args(ctx, args)


checkpoints = typer.Typer(
    cls=_Checkpoints, no_args_is_help=True, rich_markup_mode="rich", help=CHECKPOINT, epilog=CHECKPOINT_EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
app.add_typer(checkpoints, name="checkpoint")

CHECKPOINT_OF = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a folder of checkpoints, of which the newest complete one is used.")]


@checkpoints.command("show")
def show_checkpoints(
    path: Annotated[str, typer.Argument(metavar="FOLDER", help="The folder that was passed to autopar.checkpoint.save, or one of the checkpoints in it.")],
    verify: Annotated[bool, Option("--verify", metavar="", help="Read all files, and compare their checksums.")] = False,
) -> None:
    """List the checkpoints of a folder, and the contents of the newest: names, shapes, dtypes, values. "show" may be left out."""
    from autopar.cli.checkpoint import show

    raise typer.Exit(show(path, verify))


@checkpoints.command("import")
def import_checkpoint(
    source: Annotated[str, typer.Argument(metavar="DCP_FOLDER", help="A folder that torch.distributed.checkpoint has written, for example with FSDP2 or torchtitan.")],
    folder: Annotated[str, typer.Argument(metavar="OUT", help="A folder of checkpoints, to which the new one is added.")],
    allow_pickle: Annotated[bool, Option("--allow-pickle", metavar="", help="Read .metadata, which is a pickle; anything in it that is not DCP's is refused.")] = False,
    skip: Annotated[list[str] | None, Option(metavar="GLOB", help="Leave out entries with such names; may be repeated.")] = None,
) -> None:
    """Write a checkpoint from a folder of torch.distributed.checkpoint."""
    from autopar.cli.checkpoint import imported

    raise typer.Exit(imported(source, folder, allow_pickle, skip or ()))


@checkpoints.command("export")
def export_checkpoint(
    source: CHECKPOINT_OF,
    folder: Annotated[str, typer.Argument(metavar="DCP_FOLDER", help="A new folder.")],
    torchtitan: Annotated[bool, Option("--torchtitan", metavar="", help="With torchtitan's names: the model's at the top, a flattened optimizer, train_state.")] = False,
) -> None:
    """Write a folder of torch.distributed.checkpoint from a checkpoint."""
    from autopar.cli.checkpoint import exported

    raise typer.Exit(exported(source, folder, torchtitan))


@app.command()
def rules() -> None:
    """Print the table of sharding rules: how each op can be split."""
    from autopar.report.rules import page

    typer.echo(page(), nl=False)
