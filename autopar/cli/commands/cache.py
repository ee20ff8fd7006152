"""Define the options of ``autopar cache``. ``autopar.cli.cache`` runs it."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from autopar.cli.commands.options import Json, Quiet
from autopar.cli.output import OutputOptions

CACHE = "Show or empty the folder in which captured and searched programs are kept for the next start."
FOLDER = Annotated[
    str | None,
    Option("--cache", metavar="FOLDER", help="The folder. Default: AUTOPAR_CACHE, or the user's cache folder."),
]

caches = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help=CACHE,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


@caches.command("list")
def list_entries(cache: FOLDER = None, json: Json = False, quiet: Quiet = False) -> None:
    """List the entries, from the one that was used last: what each is of, its size, and its age."""
    from autopar.cli.cache import listed

    raise typer.Exit(listed(cache, OutputOptions(json=json, quiet=quiet)))


@caches.command("clear")
def clear_entries(cache: FOLDER = None, json: Json = False, quiet: Quiet = False) -> None:
    """Remove all entries."""
    from autopar.cli.cache import cleared

    raise typer.Exit(cleared(cache, OutputOptions(json=json, quiet=quiet)))
