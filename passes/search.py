"""Search: give every value and every use the Layout of the cheapest plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from autopar.capture.decompose.expanded import CPU
from autopar.costs.machine import machine
from autopar.ir.program import Program
from autopar.passes.manager import LayoutPass
from autopar.plan.boundary import Boundary
from autopar.plan.ops_without_rule import notes_without_rule
from autopar.search.search import Find, search
from autopar.search.solutions.written import write


@dataclass(frozen=True)
class Search(LayoutPass):
    """Choose the Layouts with which the explicit program is fastest on a machine.

        x : f32[32 64] = input                                 x : f32[32/dp 64] = input
        up : f32[256 64] = param                       →       up : f32[256 64] = param
        t : f32[64 256] = t(up)                                t : f32[64 256] = t(up)
        mm : f32[32 256] = mm(x, t)                            mm : f32[32/dp 256] = mm(x, t)

    Takes the place of ``place``, ``follow``, ``narrow``, ``lift`` and ``defer``, which would change nothing in what it
    finds, and of ``expand``: an op is expanded where that is cheaper. The price is that of ``autopar.price``. The
    report ends with the certificate: how much cheaper a plan could be at most.

    Without a machine, the prices are those of a generic one.

    Attributes:
        time_limit: seconds, after which the best plan so far is taken.
        memory: the most bytes that a rank may use; by default the capacity of the machine, if it is known.
        find: another search in the place of ``autopar.search.search``; it may take a plan that is known already. Who
            gives it says what the whole call or step costs, which has more in it than this program.
        device: the device of tensors that expansions create; ``None``: the CPU.
        Others are as in ``LayoutPass``; placeholders without a constraint are searched too.
    """

    name: ClassVar[str] = "search"
    takes: ClassVar[str] = "traced"
    gives: ClassVar[str] = "placed"

    time_limit: float = 60.0
    memory: float | None = None
    find: Find | bool = True
    device: torch.device | None = None

    def run(self, program: Program) -> list[str]:
        on = self.machine or machine("generic")
        boundary = Boundary(program, self._put_on_mesh(program), self.constraints, self.whole)
        find = partial(search, memory=self.memory) if isinstance(self.find, bool) else self.find
        found = find(boundary, on, strict=self.strict, time_limit=self.time_limit)
        with program.edit() as edit:
            write(edit, program, found.types, found.uses, found.inside, self.device or CPU)
        notes = [*notes_without_rule(program), *_about_idle(found.idle_axes(boundary.mesh))]
        certificate = [found.certificate] if isinstance(self.find, bool) else []
        return [*notes, *found.about_machine, *found.about_memory, *certificate]


def _about_idle(axes: list[str]) -> list[str]:
    """Say which axes the plan does not use: fewer ranks are cheaper where links are slow."""
    if not axes:
        return []
    along = axes[0] if len(axes) == 1 else "these axes"
    return [f"the cheapest plan splits nothing over {' and '.join(axes)}: all ranks along {along} do the same"]
