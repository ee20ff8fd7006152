"""Decide of which batch a step shows its programs: of the usual one, and not of the shorter last batch of an epoch."""

from __future__ import annotations

from collections import Counter

from autopar.step.choices import Chosen
from autopar.step.compiling.compiled_step import MicroBatch, StepUpdate


class Shown:
    """What reports, page and figures of a step are about: the programs with which most steps ran.

    Of equals it is the latest. Since the last ``capture(batch)`` only later steps count, so that what was captured is
    shown until steps of another batch have run.

    Attributes:
        way: how the step runs.
        programs: ``None`` before a capture.
    """

    def __init__(self, way: Chosen) -> None:
        self.way = way
        self.programs: tuple[MicroBatch, StepUpdate] | None = None
        self._steps: Counter[int] = Counter()

    def captured(self, way: Chosen, programs: tuple[MicroBatch, StepUpdate]) -> None:
        """Show what was captured."""
        self._steps.clear()
        self.way, self.programs = way, programs

    def ran(self, way: Chosen, programs: tuple[MicroBatch, StepUpdate]) -> None:
        """Count a step."""
        key = id(programs[0])
        self._steps[key] += 1
        if self.programs is None or self._steps[key] >= self._steps[id(self.programs[0])]:
            self.way, self.programs = way, programs

    def clear(self) -> None:
        """Forget what was captured."""
        self.programs = None
        self._steps.clear()
