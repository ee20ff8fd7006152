"""The context in which a process runs the programs of its rank."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.streams import Groups
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.lowering.regions import Regions
from autopar.runtime.processes.agreement import Agreement
from autopar.runtime.processes.job import Job
from autopar.runtime.processes.streams import groups_for


@dataclass(frozen=True)
class RankContext:
    """The context in which this process runs the programs of its rank.

    Attributes:
        rank: the rank on the mesh.
        job: the processes of the mesh; ``None`` in a process that is alone.
        agreement: compares the calls of the ranks; ``None`` for one rank.
        regions: compiles the functions with Inductor; ``None``: they run as they are.
    """

    rank: int
    job: Job | None = None
    agreement: Agreement | None = None
    regions: Regions | None = None

    def groups_for(self, local: LocalPrograms) -> Groups:
        """Return the names of the process groups that programs need. All ranks call it alike."""
        return {} if self.job is None else groups_for(self.job, local.every_class, self.agreement)
