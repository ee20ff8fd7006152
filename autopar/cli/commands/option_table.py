"""Build a command from a table of its options, whose types and defaults are those of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import typer


@dataclass(frozen=True)
class OptionRow:
    """One option of a command.

    Attributes:
        name: the field of the dataclass; ``clip_norm`` becomes ``--clip-norm``.
        metavar: what ``--help`` shows in place of the value; a flag has none.
        help: what the option does.
        default: what ``--help`` shows as the default; ``True``: the default itself, ``False``: nothing.
        short: ``o`` for ``-o`` beside the long name.
        complete: returns the values that complete a word in the shell.
    """

    name: str
    metavar: str
    help: str
    default: str | bool = True
    short: str = ""
    complete: Callable[[str], list[str]] | None = None


def command(
    defaults: object, panels: Mapping[str, Sequence[OptionRow]], run: Callable[[typer.Context], int], *arguments: Any
) -> Callable[..., None]:
    """Return a function that typer turns into a command: ``panels`` are the groups of options that ``--help`` shows.

    Args:
        defaults: an instance of the dataclass.
        run: takes the context, whose ``params`` are the values, and returns the exit status.
        arguments: positional arguments before the options, as ``inspect.Parameter``.
    """
    hints = get_type_hints(type(defaults))
    parameters = [inspect.Parameter("context", _KIND, annotation=typer.Context), *arguments]
    for panel, rows in panels.items():
        for row in rows:
            names = [f"--{row.name.replace('_', '-')}"]  # without a name, typer 0.27 has no option for ``rank``
            names += [f"-{row.short}"] * bool(row.short)
            option = typer.Option(
                *names, metavar=row.metavar, help=row.help, rich_help_panel=panel, show_default=row.default,
                autocompletion=row.complete,
            )  # fmt: skip
            parameters.append(parameter(row.name, hints[row.name], option, getattr(defaults, row.name)))

    def function(context: typer.Context, **values: Any) -> None:
        raise typer.Exit(run(context))

    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


_KIND = inspect.Parameter.POSITIONAL_OR_KEYWORD


def parameter(name: str, type: Any, declaration: Any, default: Any) -> inspect.Parameter:
    """Return a parameter as typer reads it.

    A ``Literal`` is a text: the command refuses others with its own error. A sequence is an option that may be
    repeated.
    """
    kind = str if get_origin(type) is Literal else type
    if get_origin(type) is Sequence:
        kind, default = list[str], [*default]
    return inspect.Parameter(name, _KIND, annotation=Annotated[kind, declaration], default=default)
