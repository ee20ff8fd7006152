"""Assemble the command ``autopar`` from its commands."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument, Option

import autopar
from autopar.cli.commands.cache import caches
from autopar.cli.commands.calibrate import CALIBRATE, CALIBRATE_EXAMPLES, calibrate
from autopar.cli.commands.checkpoint import checkpoints
from autopar.cli.commands.options import Json, Quiet
from autopar.cli.commands.plan import PLAN, PLAN_EXAMPLES, plan
from autopar.cli.commands.profile import profiles
from autopar.cli.commands.report import PAGE, PAGE_EXAMPLES, REPORT, REPORT_EXAMPLES, page, report
from autopar.cli.commands.schedule import SCHEDULE, SCHEDULE_EXAMPLES, schedule
from autopar.cli.commands.train import EXAMPLES, WHAT, train
from autopar.cli.commands.verify import VERIFY, VERIFY_EXAMPLES, verify
from autopar.cli.output import OutputOptions

app = typer.Typer(
    help="Run an ordinary PyTorch model on a mesh of devices, with the results of a single device.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autopar {autopar.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, Option("--version", metavar="", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run an ordinary PyTorch model on a mesh of devices, with the results of a single device."""


app.command("train", help=WHAT, epilog=EXAMPLES)(train)
app.command("plan", help=PLAN, epilog=PLAN_EXAMPLES)(plan)
app.command("report", help=REPORT, epilog=REPORT_EXAMPLES)(report)
app.command("page", help=PAGE, epilog=PAGE_EXAMPLES)(page)
app.command("verify", help=VERIFY, epilog=VERIFY_EXAMPLES)(verify)
app.command("schedule", help=SCHEDULE, epilog=SCHEDULE_EXAMPLES)(schedule)
app.command("calibrate", help=CALIBRATE, epilog=CALIBRATE_EXAMPLES)(calibrate)
app.add_typer(profiles, name="profile")
app.add_typer(caches, name="cache")
app.add_typer(checkpoints, name="checkpoint")


@app.command()
def rules(
    pattern: Annotated[
        str | None, Argument(metavar="PATTERN", help="A glob over names of ops, as add or *conv*; all without one.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Print the table of sharding rules: how each op can be split. Exit status 2: no op matches the pattern."""
    from autopar.cli.rules import run

    raise typer.Exit(run(pattern, OutputOptions(json=json, quiet=quiet)))
