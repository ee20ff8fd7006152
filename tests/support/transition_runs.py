"""Transitions run on all simulated ranks, as programs: on one mesh, or between two that are stages of a third."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import torch

from autopar.costs.machine import Machine
from autopar.ir import transfers
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.record import Requirement, TensorType
from autopar.ir.text.printer import print_type
from autopar.runtime.localize import localize
from autopar.runtime.simulation.pieces import cut
from autopar.runtime.simulation.simulate import compile_phases, run_ranks
from autopar.transitions import transitions

Pieces = dict[int, torch.Tensor]
Reduce = Callable[[list[torch.Tensor]], torch.Tensor]


def _by(one: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Reduce:
    return functools.partial(functools.reduce, one)


REDUCE: dict[str, Reduce] = {
    "sum": _by(torch.add),
    "avg": lambda values: functools.reduce(torch.add, values) / len(values),
    "max": _by(torch.maximum),
    "min": _by(torch.minimum),
    "prod": _by(torch.mul),
}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def normal(type: TensorType) -> TensorType:
    return replace(type, layout=Layout(type.layout.mesh, type.attr.normalize(type.shape, type.layout.mesh)))


def names(source: TensorType, target: TensorType) -> list[str]:
    """Return the names of the transfers from one layout to another: ``["reduce_scatter", "cast"]``."""
    return [step.function.__name__ for step in transitions(source, target)]


def read(text: str, on: str, **stages: str) -> TensorType:
    """``f32[4/dp 8] +tp`` as a type."""
    program = Program.parse(f"program placed on {on}\n{heads(stages)}  x : {text} = input\n  return x\n")
    return program.node("x").meta["autopar"].type


def heads(stages: dict[str, str]) -> str:
    return "".join(f"stage {name} on {mesh}\n" for name, mesh in stages.items())


def wide(x: torch.Tensor) -> torch.Tensor:
    """In a dtype of the same kind that holds what small numbers reduce to; no CPU adds all narrow ones."""
    if x.dtype == torch.bool:
        return x
    if x.dtype == torch.uint64:  # the largest stands in for what int64 does not hold
        return torch.where(x.view(torch.int64) < 0, torch.iinfo(torch.int64).max, x.view(torch.int64))
    return x.to(torch.complex128 if x.is_complex() else torch.float64 if x.is_floating_point() else torch.int64)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit, of the same dtype and shape."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.dtype in FLOAT8 else torch.equal(a, b)


def grid(mesh: Mesh) -> str:
    return f"{mesh}" if mesh.ranks == tuple(range(mesh.size)) else f"{mesh} ranks {' '.join(map(str, mesh.ranks))}"


def explicit_program(
    source: TensorType, target: TensorType, world: Mesh | None = None, machine: Machine | None = None
) -> Program:
    """An input that lies as ``source``, re-laid and returned as ``target``; ``world`` where they do not lie on the mesh
    itself."""
    ends = [type.layout.mesh for type in (source, target)]
    stages = heads({mesh.name: grid(mesh) for mesh in ends if mesh.name is not None})
    program = Program.parse(
        f"program explicit on {grid(world or ends[0])}\n{stages}  x : {print_type(normal(source))} = input\n  return "
        f"x\n"
    )
    x, output = program.node("x"), program.output
    with program.edit() as edit:
        value = x
        for step in transitions(source, target, machine):
            args, kwargs = transfers.call(step.function, value, dict(step.arguments))
            value = edit.insert(step.function, args, kwargs, before=output)
        edit.replace_use(output, x, value)
        edit.annotate(output, uses=(Requirement(normal(target).layout, target.dtype),))
    program.verify()
    assert Program.parse(str(program)) == program
    return program


def run(
    source: TensorType, target: TensorType, pieces: Pieces, world: Mesh | None = None, machine: Machine | None = None
) -> Pieces:
    """What each rank of the target's mesh holds after the localized programs have run."""
    program = explicit_program(source, target, world, machine)
    code, values = {}, {}
    for rank in program.mesh.ranks:
        local = localize(program, program.mesh.coordinates(rank))
        local.verify()
        assert Program.parse(str(local)) == local
        code[rank] = compile_phases(local).get("forward", [])
        values[rank] = {"x": pieces[rank]} if rank in pieces else {}
    run_ranks(program.meshes, code, values)
    name = program.output.args[0][0].name
    return {rank: values[rank][name] for rank in target.layout.mesh.ranks}


def addends(type: TensorType, values: torch.Tensor) -> tuple[torch.Tensor, Pieces]:
    """A global value and pieces of it: random addends (or candidates for a max) where it is pending.

    ``values`` holds one global addend for each rank; those at equal coordinates of the pending axes are one.
    """
    mesh, pending = type.layout.mesh, type.attr.pending
    chosen = {tuple(at[axis] for axis, _ in pending): value for at, value in zip(mesh.points(), values, strict=True)}
    kinds = {kind for _, kind in pending} or {"sum"}
    assert len(kinds) == 1, "which of two kinds is reduced first would matter"
    whole = (
        REDUCE[kinds.pop()]([wide(value) for value in chosen.values()]).to(values.dtype)
        if len(chosen) > 1
        else next(iter(chosen.values()))
    )
    held = replace(type, layout=Layout(mesh, type.attr.without_pending()))
    return whole, {
        rank: cut(chosen[tuple(mesh.coordinates(rank)[axis] for axis, _ in pending)], held, mesh.coordinates(rank))
        for rank in mesh.ranks
    }


def whole_numbers(type: TensorType) -> torch.Tensor:
    """For each rank a global addend, of numbers whose sums, products and averages are exact in every dtype."""
    mesh, shape = type.layout.mesh, type.shape
    kinds = {kind for _, kind in type.attr.pending}
    values = torch.randint(0, 3, (mesh.size, *shape))
    if type.dtype.is_complex:
        values = values + 1j * torch.randint(0, 3, (mesh.size, *shape))
    return (values * (mesh.size if kinds == {"avg"} else 1)).to(type.dtype)


def check(
    source: TensorType,
    target: TensorType,
    values: torch.Tensor | None = None,
    world: Mesh | None = None,
    machine: Machine | None = None,
) -> Pieces:
    """Run the transition; each rank must hold its piece, or pieces that reduce to it where the target is pending."""
    whole, pieces = addends(source, whole_numbers(source) if values is None else values)
    found = run(source, target, pieces, world, machine)
    mesh = target.layout.mesh
    there = replace(target, layout=Layout(mesh, target.attr.without_pending()))
    wanted = whole.to(target.dtype)
    assert sorted(found) == sorted(mesh.ranks)
    for rank in mesh.ranks:
        at = mesh.coordinates(rank)
        assert found[rank].dtype == target.dtype
        assert tuple(found[rank].shape) == target.attr.local_shape(target.shape, mesh, at)
        assert found[rank].is_contiguous()
        ours = reduced(found, mesh, at, target.attr.pending).to(target.dtype)
        assert equal(ours, cut(wanted, there, at)), (
            rank,
            print_type(source),
            print_type(target),
            transitions(source, target, machine),
        )
    return found


def reduced(found: Pieces, mesh: Mesh, at: dict[str, int], pending: tuple[tuple[str, str], ...]) -> torch.Tensor:
    """What the pieces of the ranks that differ from ``at`` in the pending axes alone reduce to."""
    if not pending:
        return found[mesh.rank(at)]
    points = itertools.product(*(range(mesh.sizes[axis]) for axis, _ in pending))
    (kind,) = {kind for _, kind in pending}
    names = [axis for axis, _ in pending]
    return REDUCE[kind]([wide(found[mesh.rank({**at, **dict(zip(names, point, strict=True))})]) for point in points])
