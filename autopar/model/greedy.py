"""Place programs greedily, for a search that compares its plan with presets."""

from __future__ import annotations

from torch import fx

from autopar.costs.machine import Machine
from autopar.ir.commit import Staged, Value
from autopar.ir.program import Program
from autopar.passes import Expand, Fold, Follow, Levels, Lift, Narrow, Pass, Place, Reshard, Share
from autopar.plan.boundary import Boundary
from autopar.report.memory import memory_of
from autopar.runtime.localize import LocalPrograms
from autopar.search.starts.copied import Copied


class GreedyPasses:
    """Runs the passes without ``defer``, which changes the ops of a program."""

    def placed(self, boundary: Boundary, machine: Machine, *, strict: bool) -> Copied:
        copy = boundary.program.copy()
        nodes = dict(zip(boundary.program.nodes, copy.nodes, strict=True))
        own = {theirs: node for node, theirs in nodes.items()}
        how = boundary.mesh, boundary.constraints, strict, boundary.whole, machine
        made = {own[node]: [_node(step) for step in steps] for node, steps in Expand(*how).expanded(copy).items()}
        return Copied(_run(copy, Place(*how), Follow(machine), Narrow(), Lift()), nodes, made)

    def explicit(self, placed: Program, machine: Machine) -> Program:
        return _run(placed.copy(), Reshard(machine=machine), Fold(machine=machine), Share(), Levels(machine))

    def peak(self, placed: Program, machine: Machine) -> int:
        return memory_of(LocalPrograms(self.explicit(placed, machine), lambda local: None)[0]).peak


def _node(value: Value) -> fx.Node:
    node = value.node if isinstance(value, Staged) else value
    assert node is not None
    return node


def _run(program: Program, *passes: Pass) -> Program:
    for step in passes:
        step.run(program)
        program.level = step.gives
    return program
