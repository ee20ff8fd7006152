"""Hold the lines of a program, function by function."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.scheduling.lines import Line


@dataclass(frozen=True)
class FunctionLines:
    """The lines of the part of a program that runs as one function; ``phases``: those that it runs, in order."""

    phases: tuple[str, ...]
    lines: tuple[Line, ...]
