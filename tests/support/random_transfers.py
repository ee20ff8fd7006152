"""Draw programs of nothing but transfers: every kind, dtype and dim, even and uneven, of any size."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import torch
from transition_runs import addends

from autopar.ir.nodes import operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import DTYPES
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.simulation.pieces import cut
from autopar.runtime.simulation.simulate import compile_whole, run_ranks

# operand, transfer, result; a and b are sizes
TRANSFERS = """
    [{a} {b}] +{x} = all_reduce(v, {x}) = [{a} {b}]
    [{a}] +{x} = all_reduce(v, {x}) = [{a}]
    [] +{x} = all_reduce(v, {x}) = []
    [{a}/{y} {b}] +{x} = all_reduce(v, {x}) = [{a}/{y} {b}]
    [{a} {b}] +max:{x} = all_reduce(v, {x}, op=max) = [{a} {b}]
    [{a}] +min:{x} = all_reduce(v, {x}, op=min) = [{a}]
    [{a} {b}] +{x} +{y} = all_reduce(v, ({x}, {y})) = [{a} {b}]
    [{a}/{x} {b}] = all_gather(v, 0, {x}) = [{a} {b}]
    [{a} {b}/{x}] = all_gather(v, 1, {x}) = [{a} {b}]
    [{a}/{y} {b}/{x}] = all_gather(v, 1, {x}) = [{a}/{y} {b}]
    [(3 {a}/{x}) {b}] = all_gather(v, 1, {x}, parts=((3, {a}), ({b},))) = [{a3} {b}]
    [{a} {b}] +{x} = reduce_scatter(v, 0, {x}) = [{a}/{x} {b}]
    [{a} {b}] +{x} = reduce_scatter(v, 1, {x}) = [{a} {b}/{x}]
    [{a} {b}/{y}] +{x} = reduce_scatter(v, 0, {x}) = [{a}/{x} {b}/{y}]
    [{a3} {b}] +{x} = reduce_scatter(v, 1, {x}, parts=((3, {a}), ({b},))) = [(3 {a}/{x}) {b}]
    [{a}/{x} {b}] = all_to_all(v, 0, 1, {x}) = [{a} {b}/{x}]
    [{a}/{x} {b}/{y}] = redistribute(v, (({y},), ({x},))) = [{a}/{y} {b}/{x}]
"""
ROWS = [tuple(part.strip() for part in line.split(" = ")) for line in TRANSFERS.split("\n") if line.strip()]
SIZES = [0, 1, 2, 3, 4, 5, 6, 7, 12]
NAMES = ["f64", "f64", "f32", "bf16", "f16", "i64", "i32", "u8", "bool", "c128"]


def random_transfers(r: random.Random, mesh: Mapping[str, int], count: int = 12) -> Program:
    """An explicit program of so many transfers."""
    placeholders, lines, results = [], [], []
    for k in range(count):
        source, call, target = r.choice(ROWS)
        x, y = r.sample(list(mesh), 2)
        if f"+{x} +{y}" in source.format(x=x, y=y, a=1, b=1, a3=3) and list(mesh).index(x) > list(mesh).index(y):
            x, y = y, x
        a, b = r.choice(SIZES), r.choice(SIZES)
        dtype = r.choice(
            [n for n in NAMES if not DTYPES[n].is_complex or ("max" not in source and "min" not in source)]
        )
        named = {"x": x, "y": y, "a": a, "b": b, "a3": 3 * a}
        placeholders.append(f"  v{k} : {dtype}{source.format(**named)} = input")
        call = call.format(**named).replace("(v,", f"(v{k},")
        lines.append(f"  y{k} : {dtype}{target.format(**named)} = {call}")
        results.append(f"y{k}")
    head = "program explicit on " + " ".join(f"{axis}={size}" for axis, size in mesh.items())
    text = "\n".join([head, *placeholders, "forward:", *lines, f"  return ({', '.join(results)},)"]) + "\n"
    return Program.parse(text)


def pieces_of(program: Program) -> dict[int, dict[str, torch.Tensor]]:
    """Values of the placeholders of all ranks: whole numbers, so that any sum of them is exact."""
    mesh, found = program.mesh, {}
    assert mesh is not None
    found = {rank: {} for rank in mesh.ranks}
    for node in program.placeholders:
        type = tensor_type(node)
        shape = (mesh.size, *type.shape) if type.attr.pending else type.shape
        values = (torch.arange(math.prod(shape)) * 7 % 5).reshape(shape)
        values = (values + 1j if type.dtype.is_complex else values).to(type.dtype)
        own = (
            addends(type, values)[1] if type.attr.pending
            else {rank: cut(values, type, mesh.coordinates(rank)) for rank in mesh.ranks}
        )  # fmt: skip
        for rank in mesh.ranks:
            found[rank][node.name] = own[rank]
    return found


def results_on_ranks(program: Program, local: LocalPrograms) -> dict[int, Sequence[torch.Tensor]]:
    """What simulated ranks return."""
    values = pieces_of(program)
    run_ranks(program.meshes, {rank: compile_whole(local[rank]) for rank in values}, values)
    names = [node.name for node in operands(program.output)]
    assert all(record_of(node).role == "input" for node in program.placeholders)
    return {rank: [own[name] for name in names] for rank, own in values.items()}
