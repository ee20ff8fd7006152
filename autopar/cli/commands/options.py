"""Define the rows of options that several commands have: the model, what is planned, and what is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer import Option

from autopar.cli.commands.option_table import OptionRow, parameter
from autopar.cli.models.hugging_face import configurations
from autopar.cli.models.options import ModelOptions
from autopar.cli.plan.options import MESH
from autopar.cli.train.optimizers import OPTIMIZERS
from autopar.cli.train.sizes import SIZES
from autopar.plan.plan import SEARCH
from autopar.plan.presets import PRESETS

MODELS = (
    f"The model is a small Llama ({', '.join(SIZES)}); a configuration by name ({', '.join(configurations())}); a "
    "class or a model type of Hugging Face, as LlamaForCausalLM; a folder with a config.json; or what a function of "
    "yours returns: a model, or a model and the arguments of one call. A class of modules without arguments does, too. "
    "It is captured on the meta device, where tensors take no memory."
)
MODEL = typer.Argument(
    metavar="MODEL",
    help=f"{', '.join(SIZES)}; {', '.join(configurations())}; an architecture; FOLDER; or FILE.py:FUNCTION, "
    "package.module:FUNCTION.",
    autocompletion=lambda incomplete: starting((*SIZES, *configurations()), incomplete),
)
MODEL_ARGUMENT = parameter("model", str, MODEL, ModelOptions.model)


def starting(names: Sequence[str], incomplete: str) -> list[str]:
    """Return the names that complete a word, for the shell."""
    return [name for name in names if name.startswith(incomplete)]


def machines(incomplete: str) -> list[str]:
    """Return the names of machines that complete a word."""
    from autopar.costs.machine import known

    return starting([*known()], incomplete)


def of(names: Sequence[str]) -> Any:
    """Return a completion of a word by these names."""
    return lambda incomplete: starting(names, incomplete)


CALL = (
    OptionRow(
        "inputs", "NAME=DTYPE[SIZES],…", "The arguments of a call, as input_ids=i64[8,2048]; labels are added.", False
    ),
    OptionRow("example", "FILE.py:FUNCTION", "Or a function that returns them: a tuple, or a dict of keywords.", False),
    OptionRow(
        "set",
        "NAME=VALUE,…",
        "What the configuration of an architecture has, as num_hidden_layers=4; may be repeated.",
        False,
    ),
    OptionRow("batch", "NUMBER", "Rows of the batch, of a model that is not your own."),
    OptionRow("sequence", "NUMBER", "Tokens of each."),
)
MACHINE = OptionRow(
    "machine",
    "NAME|FILE",
    "The machine whose seconds are added up: its name, as torch prints that of a device, or a file that autopar "
    "calibrate has written.",
    "this machine",
    complete=machines,
)
CACHE = OptionRow(
    "cache",
    "FOLDER",
    "Where captured and searched programs are kept for the next start; an empty name switches that off.",
    "AUTOPAR_CACHE, or the user's cache folder",
)
WHERE = (
    OptionRow("mesh", "AXIS=SIZE,…", "Axes and their sizes; there is one rank for each point of the grid.", MESH),
    OptionRow("devices", "NUMBER", "Or so many ranks: the mesh is chosen with the plan.", False),
    OptionRow(
        "plan",
        "PRESET|search|FILE",
        f"{', '.join(PRESETS)}; search finds the cheapest plan; or a JSON file of globs, or of a saved plan.",
        complete=of((*PRESETS, SEARCH)),
    ),
    MACHINE,
    OptionRow("memory", "BYTES", "The most bytes that a rank may use, such as 80e9.", "what the machine has"),
    OptionRow("time_limit", "SECONDS", "When a search ends with the best plan so far."),
    CACHE,
)
OPTIMIZER = OptionRow(
    "optimizer",
    "NAME",
    f"Plan a whole training step with this optimizer: {', '.join(OPTIMIZERS)}.",
    "a call with its backward",
    complete=of((*OPTIMIZERS,)),
)
PLANNED = {"Plan": WHERE, "What is planned": (*CALL, OPTIMIZER)}

JSON_HELP = "Print one JSON object on stdout, and remarks on stderr."
QUIET_HELP = "Print errors only."
OUTPUT = {"Output": (OptionRow("json", "", JSON_HELP), OptionRow("quiet", "", QUIET_HELP, short="q"))}
Json = Annotated[bool, Option("--json", metavar="", help=JSON_HELP, rich_help_panel="Output")]
Quiet = Annotated[bool, Option("--quiet", "-q", metavar="", help=QUIET_HELP, rich_help_panel="Output")]
