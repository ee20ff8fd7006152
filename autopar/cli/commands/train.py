"""Define the options of ``autopar train``. ``autopar.cli.train`` runs it."""

from __future__ import annotations

import typer

from autopar.cli.commands.option_table import OptionRow, command
from autopar.cli.commands.options import CACHE, OUTPUT
from autopar.cli.commands.stages import STAGES
from autopar.cli.train.optimizers import OPTIMIZERS
from autopar.cli.train.options import AMPS, DEVICES, DTYPES, LOSS_SCALE, RECOMPUTED, TrainOptions, options_of
from autopar.cli.train.presets import TRAININGS
from autopar.cli.train.sizes import SIZES
from autopar.plan.presets import PRESETS

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

[cyan]autopar train --mesh pp=2,tp=2 --schedule zb-h1 --microbatches 8[/cyan] — two stages of a pipeline

[cyan]torchrun --nproc-per-node 4 -m autopar train --mesh dp=4[/cyan] — in processes that torchrun starts

[cyan]torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 9 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
-m autopar train --elastic --checkpoint runs/a[/cyan] — on each of two hosts; goes on with one when the other is lost

[bold]Exit status[/bold]

0: the losses are the same.  1: they differ, are not finite, or a rank failed.  2: the options were refused.
"""

OPTIONS = {
    "Mesh": (
        OptionRow(
            "preset",
            "NAME",
            "A named set of options; other options of the command line override it. "
            + "; ".join(f"{name}: {preset.what}" for name, preset in TRAININGS.items())
            + ".",
            False,
        ),
        OptionRow("mesh", "AXIS=SIZE,…", "Axes and their sizes; there is one rank for each point of the grid."),
        OptionRow(
            "plan",
            "PRESET|search|FILE",
            f"{', '.join(PRESETS)}; search finds the cheapest plan; or a JSON file: a plan that was saved, or globs: "
            '{"*.up_proj.weight": ["tp", null]}.',
            "megatron with an axis tp, else ddp",
        ),
        OptionRow("simulate", "", "Run all ranks in this process, without a process group."),
        OptionRow(
            "device",
            "NAME",
            f"The device of the ranks: {', '.join(DEVICES)}.",
            "cuda with a GPU for each rank, else cpu",
        ),
        CACHE,
        OptionRow("timeout", "SECONDS", "End a job that makes no progress for this time."),
        OptionRow("port", "NUMBER", "The port of the processes' rendezvous.", "a free port"),
    ),
    "Training": (
        OptionRow("size", "NAME", f"The size of the Llama: {', '.join(SIZES)}."),
        OptionRow("text", "FILE", "The text to train on, read as bytes.", "the sources of Python's standard library"),
        OptionRow("steps", "NUMBER", "The number of updates of the weights."),
        OptionRow("batch", "NUMBER", "Sequences per step, over all ranks."),
        OptionRow("sequence", "NUMBER", "Bytes per sequence."),
        OptionRow("dtype", "NAME", f"The dtype of weights and gradients: {', '.join(DTYPES)}."),
        OptionRow("seed", "NUMBER", "The seed of weights and batches."),
    ),
    "Step": (
        OptionRow("microbatches", "NUMBER", "Micro-batches per batch, with gradient accumulation."),
        *STAGES,
        OptionRow(
            "amp",
            "POLICY",
            f"Mixed precision: {', '.join(AMPS)}. O1 is as torch.autocast, O2 has float32 master weights.",
        ),
        OptionRow(
            "loss_scale", "NUMBER", "With fp16, the first scale of the loss, which then adapts.", f"{LOSS_SCALE:g}"
        ),
        OptionRow(
            "recompute",
            "WHAT",
            f"Recompute in the backward instead of keeping: {', '.join(RECOMPUTED)}, or a glob over modules.",
        ),
        OptionRow(
            "zero", "STAGE", "Shard over the data axis: 1 the optimizer's state, 2 also gradients, 3 also parameters."
        ),
        OptionRow("clip_norm", "NUMBER", "Clip the norm of all gradients to this value.", "inf: not clipped"),
        OptionRow("optimizer", "NAME", f"An optimizer of torch: {', '.join(OPTIMIZERS)}."),
        OptionRow("lr", "NUMBER", "Learning rate.", "the rate of the size"),
        OptionRow(
            "warmup", "STEPS", "Steps in which the learning rate rises, before a cosine decay; 0: a constant rate."
        ),
        OptionRow("weight_decay", "NUMBER", "The optimizer's weight decay."),
    ),
    "Checkpoints": (
        OptionRow("checkpoint", "FOLDER", "The folder for checkpoints; the newest two are kept.", False),
        OptionRow("every", "STEPS", "Steps between two checkpoints; there is also one at the end."),
        OptionRow(
            "resume",
            "",
            "Continue from the newest complete checkpoint, on any mesh and stage of ZeRO; start anew if there is none.",
        ),
        OptionRow(
            "elastic",
            "",
            "Under torchrun --nnodes MIN:MAX: after a host was lost or has come back, --resume on the mesh of the "
            "ranks that are there, with the same batch.",
        ),
        OptionRow(
            "meshes",
            "MESH;MESH…",
            "With --elastic, the allowed meshes, the best first, as in 'dp=2,tp=2;tp=2' or 'dp=*,tp=2'.",
            "--mesh, with a data axis of any size",
        ),
    ),
    "Comparison": (
        OptionRow(
            "tolerance",
            "NUMBER",
            "The largest accepted relative difference of two losses, and of two norms of gradients.",
            f"{', '.join(f'{tolerance.loss:g} for {name}' for name, (_, tolerance) in DTYPES.items())}; "
            f"{', '.join(f'{tolerance.loss:g} for {name}' for name, tolerance in AMPS.items() if tolerance)}; more "
            f"for norms in low precision",
        ),
    ),
    **OUTPUT,
}


def _run(context: typer.Context) -> int:
    """Train with the options of the command line; the status is 0 if the losses are the same."""
    from autopar.cli.train.run import run

    sources = {name: context.get_parameter_source(name) for name in context.params}
    explicit = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
    return run(options_of({name: context.params[name] for name in explicit}))


train = command(TrainOptions(), OPTIONS, _run)
