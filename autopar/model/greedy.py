"""Place programs greedily, for a search that compares its plan with presets."""

from __future__ import annotations

from autopar.costs.machine import Machine
from autopar.ir.program import Program
from autopar.passes import Fold, Follow, Lift, Pass, Place, Reshard, Share
from autopar.plan.boundary import Boundary
from autopar.report.memory import memory_of
from autopar.runtime.localize import LocalPrograms


class GreedyPasses:
    """Runs the passes without ``defer`` and ``expand``, which change the ops of a program."""

    def placed(self, boundary: Boundary, machine: Machine, *, strict: bool) -> Program:
        placing = Place(boundary.mesh, boundary.constraints, strict, boundary.whole, machine)
        return _run(boundary.program.copy(), placing, Follow(machine), Lift())

    def explicit(self, placed: Program, machine: Machine) -> Program:
        return _run(placed.copy(), Reshard(machine=machine), Fold(machine=machine), Share())

    def peak(self, placed: Program, machine: Machine) -> int:
        return memory_of(LocalPrograms(self.explicit(placed, machine), lambda local: None)[0]).peak


def _run(program: Program, *passes: Pass) -> Program:
    for step in passes:
        step.run(program)
        program.level = step.gives
    return program
