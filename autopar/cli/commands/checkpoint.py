"""Define the options of ``autopar checkpoint`` and of its subcommands. ``autopar.cli.checkpoint`` runs them."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from autopar.cli.commands.options import Json, Quiet
from autopar.cli.output import OutputOptions

CHECKPOINT = (
    "Show checkpoints, or convert them from and to torch.distributed.checkpoint (DCP), as FSDP2 and torchtitan use it. "
    "[bold]autopar checkpoint FOLDER[/bold] is [bold]autopar checkpoint show FOLDER[/bold], with its options."
)

CHECKPOINT_EXAMPLES = """
[bold]Examples[/bold]

[cyan]autopar checkpoint runs/a[/cyan] — list a folder of checkpoints, and the contents of the newest

[cyan]autopar checkpoint runs/a --verify[/cyan] — read all files of the newest, and compare their checksums

[cyan]autopar checkpoint import outputs/checkpoint/step-100 runs/b --allow-pickle[/cyan]

[cyan]autopar checkpoint export runs/a outputs/checkpoint/step-200 --torchtitan[/cyan]

[bold]Exit status[/bold]

0: done.  1: the reader of the output closed it.  2: the options were refused, or a checkpoint is damaged.
"""


class _Checkpoints(TyperGroup):
    """Makes ``autopar checkpoint FOLDER`` mean ``autopar checkpoint show FOLDER``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["show", *args]
        return super().parse_args(ctx, args)


checkpoints = typer.Typer(
    cls=_Checkpoints, no_args_is_help=True, rich_markup_mode="rich", help=CHECKPOINT, epilog=CHECKPOINT_EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
CHECKPOINT_OF = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT", help="A checkpoint, or a folder of checkpoints, of which the newest complete one is used."
    ),
]


@checkpoints.command("show")
def show_checkpoints(
    path: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER",
            help="The folder that was passed to autopar.checkpoint.save, or one of the checkpoints in it.",
        ),
    ],
    verify: Annotated[
        bool, Option("--verify", metavar="", help="Read all files, and compare their checksums.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List the checkpoints of a folder, and show the names, shapes, dtypes and values that the newest holds."""
    from autopar.cli.checkpoint import show

    raise typer.Exit(show(path, verify, OutputOptions(json=json, quiet=quiet)))


@checkpoints.command("import")
def import_checkpoint(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DCP_FOLDER",
            help="A folder that torch.distributed.checkpoint has written, for example with FSDP2 or torchtitan.",
        ),
    ],
    folder: Annotated[
        str, typer.Argument(metavar="OUT", help="A folder of checkpoints, to which the new one is added.")
    ],
    allow_pickle: Annotated[
        bool,
        Option(
            "--allow-pickle",
            metavar="",
            help="Read .metadata, which is a pickle; anything in it that is not DCP's is refused.",
        ),
    ] = False,
    skip: Annotated[
        list[str] | None, Option(metavar="GLOB", help="Leave out entries with such names; may be repeated.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a checkpoint from a folder of torch.distributed.checkpoint."""
    from autopar.cli.checkpoint import imported

    raise typer.Exit(imported(source, folder, allow_pickle, skip or (), OutputOptions(json=json, quiet=quiet)))


@checkpoints.command("export")
def export_checkpoint(
    source: CHECKPOINT_OF,
    folder: Annotated[str, typer.Argument(metavar="DCP_FOLDER", help="A new folder.")],
    torchtitan: Annotated[
        bool,
        Option(
            "--torchtitan",
            metavar="",
            help="With torchtitan's names: the model's at the top, a flattened optimizer, train_state.",
        ),
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a folder of torch.distributed.checkpoint from a checkpoint."""
    from autopar.cli.checkpoint import exported

    raise typer.Exit(exported(source, folder, torchtitan, OutputOptions(json=json, quiet=quiet)))
