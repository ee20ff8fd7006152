"""Search small programs, apply what was found, and price it as the explicit program that it becomes."""

from __future__ import annotations

import autopar
from autopar import Mesh, Program
from autopar.costs.machine import Link, Machine, machine_from
from autopar.ir.nodes import is_getitem
from autopar.passes import Fold, Levels, Reshard, Share, run_passes
from autopar.rules.binding import bind_node
from autopar.rules.strategies import Bound
from autopar.search.solutions.found import Found
from autopar.search.solutions.written import write
from autopar.verify.levels import verify

# two ranks on a node, and slow in all: layouts matter for values of a few hundred elements
SLOW = Machine(
    "slow", "cpu", 2, Link(1e-6, 1e8), Link(2e-6, 5e7), Link(1e-7, 1e9), (("f32", 1e9), ("bf16", 4e9), ("f64", 5e8))
)
FAST = Machine("fast links", "cpu", 64, Link(1e-7, 1e9), Link(1e-7, 1e9), Link(1e-9, 1e6))  # its memory is slow
MACHINES = (SLOW, machine_from("cpu"), machine_from("NVIDIA H100 80GB HBM3"))
MESHES = (Mesh(a=2), Mesh(a=2, b=2))


def traced(lines: str) -> Program:
    return Program.parse(f"program traced\n{lines.strip(chr(10))}\n")


def bound_rules(lines: str) -> dict[str, Bound]:
    """The bound rule of each op of a traced program."""
    nodes = traced(lines).nodes
    return {node.name: bind_node(node) for node in nodes if node.op == "call_function" and not is_getitem(node)}


def explicit(program: Program, mesh: Mesh, machine: Machine, found: Found) -> Program:
    """The explicit program that a traced one becomes, as a copy."""
    made = program.copy()
    made.mesh = mesh
    nodes = {node.name: node for node in made.nodes}
    with made.edit() as edit:
        types, uses, inside = ({nodes[node.name]: each for node, each in of.items()}
                               for of in (found.types, found.uses, found.inside))  # fmt: skip
        write(edit, made, types, uses, inside)
    made.level = "placed"
    verify(made, "search")
    run_passes(made, [Reshard(machine=machine), Fold(machine=machine), Share(), Levels(machine)])
    return made


def price(program: Program, mesh: Mesh, machine: Machine, found: Found) -> int:
    return autopar.price(explicit(program, mesh, machine, found), machine).nanoseconds
