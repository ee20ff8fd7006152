"""Say what a command has found: as text, as one JSON object, or not at all."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

WIDTH = 100  # columns of an output that is no terminal


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The options of every command: what it writes."""

    json: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class Output:
    """Where a command writes.

    Attributes:
        text: for people, on stdout; silent with ``--json`` and ``--quiet``.
        notes: for remarks: with the text, or on stderr beside a JSON object; silent with ``--quiet``.
        json: whether stdout has one JSON object and nothing else.
    """

    text: Console
    notes: Console
    json: bool

    def give(self, found: Mapping[str, Any]) -> None:
        """Print the JSON object, if one is wanted."""
        if self.json:
            print(json.dumps(finite(found), ensure_ascii=False, allow_nan=False))


def output_of(options: OutputOptions, speaks: bool = True) -> Output:
    """Return where a command writes. ``speaks``: whether it is the rank that does."""
    text = console_of(speaks and not options.json and not options.quiet)
    beside = console_of(speaks and not options.quiet, stderr=True) if options.json else text
    return Output(text, beside, options.json and speaks)


def console_of(speaks: bool, *, stderr: bool = False) -> Console:
    """Return the console of a rank; only one rank prints. Tables fit the terminal, or else 100 columns."""
    console = Console(quiet=not speaks, highlight=False, markup=False, stderr=stderr)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def finite(found: Any) -> Any:
    """Return what JSON can hold: infinities and NaN, which it does not have, become ``None``."""
    if isinstance(found, Mapping):
        return {str(key): finite(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [finite(value) for value in found]
    if isinstance(found, float) and not math.isfinite(found):
        return None
    return found
