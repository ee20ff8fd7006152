"""Run passes one after the other, verify the program after each, and keep a report of each."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from autopar.costs.machine import Machine
from autopar.gc_pause import gc_paused
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.plan.propagation import LayoutPropagation, PropagationOptions
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


@dataclass(frozen=True)
class LayoutPass(Pass):
    """A pass that gives Layouts to the values of a program by layout propagation.

    Attributes:
        mesh: the mesh; by default the program's own.
        constraints: node → DistAttr; a Layout that a node of the traced program already has is a constraint too. Other
            placeholders are replicated. All readers of a constrained result read it in this layout; dims with ``?`` are
            free.
        strict: refuse ops without a rule. Otherwise a rule is discovered by running the op; if none is found, the op
            runs on whole operands on every rank. The report notes both.
        whole: whether returned values are gathered.
        machine: the machine whose nanoseconds are compared; without one moved bytes are.
    """

    mesh: Mesh | None = None
    constraints: Mapping[str, DistAttr] = field(default_factory=dict)
    strict: bool = False
    whole: bool = False
    machine: Machine | None = None

    def _put_on_mesh(self, program: Program) -> Mesh:
        """Make the mesh of the pass that of the program.

        Raises:
            ValueError: neither has a mesh.
        """
        mesh = self.mesh or program.mesh
        if mesh is None:
            raise ValueError(f"{self.name} needs a mesh: {type(self).__name__}(mesh=Mesh(dp=2))")
        program.mesh = mesh
        return mesh

    def _propagation(self, program: Program, mesh: Mesh, expanding: bool = False) -> LayoutPropagation:
        options = PropagationOptions(mesh, self.constraints, self.strict, self.whole, self.machine)
        propagation = LayoutPropagation(program, options, expanding=expanding)
        propagation.run()
        return propagation


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
