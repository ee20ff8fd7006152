"""Hold the lines of a program, function by function."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.scheduling.lines import Line


@dataclass(frozen=True)
class FunctionLines:
    """The lines of the part of a program that runs as one function.

    Attributes:
        phases: those that it runs, in order.
        lines: its ops and transfers, in order.
        late: the collectives that run on the stream ``late``, a second process group over their ranks.
    """

    phases: tuple[str, ...]
    lines: tuple[Line, ...]
    late: frozenset[str] = frozenset()
