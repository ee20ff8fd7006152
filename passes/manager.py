"""Run passes one after the other, verify the program after each, and keep a report of each."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import ClassVar

from autopar.gc_pause import gc_paused
from autopar.ir.program import Program
from autopar.report.passes import PassReport
from autopar.report.progress import doing
from autopar.report.transfers import bytes_per_axis
from autopar.verify.levels import verify


class Pass:
    """One named step over a program. Subclasses are dataclasses whose fields are the options.

    Class attributes:
        name: the name in reports and errors.
        takes, gives: the levels before and after.
    """

    name: ClassVar[str]
    takes: ClassVar[str]
    gives: ClassVar[str]

    def run(self, program: Program) -> Iterable[str] | None:
        """Change the program in place, through at most one commit. Returns sentences for the report, if any."""
        raise NotImplementedError


def run_passes(program: Program, passes: Iterable[Pass]) -> list[PassReport]:
    """Run passes in order on ``program``, in place.

    Raises:
        ValueError: a pass does not take the program's level.
        VerifyError: the program violates the rules of the level that a pass gives; the error names the pass.
    """
    reports = []
    for step in passes:
        if program.level != step.takes:
            raise ValueError(f"the pass {step.name} takes a {step.takes} program, this one is {program.level}")
        before = (program.counts.commits, program.counts.inserted, program.counts.removed)
        start = time.perf_counter()
        with gc_paused(), doing(step.name):
            notes = tuple(step.run(program) or ())
        program.level = step.gives
        seconds = time.perf_counter() - start
        with gc_paused(), doing(f"verify {step.name}"):
            verify(program, step.name)
        commits, inserted, removed = (
            now - then
            for now, then in zip(
                (program.counts.commits, program.counts.inserted, program.counts.removed), before, strict=True
            )
        )
        reports.append(PassReport(step.name, seconds * 1e3, inserted, removed, commits, bytes_per_axis(program), notes))
    return reports
