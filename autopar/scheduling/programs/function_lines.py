"""Hold the lines of one function of a program."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.scheduling.lines import Line


@dataclass(frozen=True)
class FunctionLines:
    """The lines of the part of a program that runs as one function.

    Attributes:
        phases: the phases that it runs, in order.
        lines: its lines, in the order of issue.
        stage: the stage of a pipeline; empty where a program has none.
        late: the collectives that run on the stream ``late``, a second process group over their ranks.
    """

    phases: tuple[str, ...]
    lines: tuple[Line, ...]
    late: frozenset[str] = frozenset()
    stage: str = ""
