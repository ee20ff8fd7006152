"""Compute what a program gives: on a single device, where transfers do nothing, and on simulated ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from goldens import read
from torch import fx
from transition_runs import REDUCE, Pieces, addends

from autopar import Mesh
from autopar.ir import transfers
from autopar.ir.layout import Layout
from autopar.ir.nodes import map_operands, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import PHASES, TensorType
from autopar.passes import Pass, Place, Reshard, run_passes
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.simulation.pieces import cut, join
from autopar.runtime.simulation.simulate import ANY_STRIDES, compile_phases, run_ranks
from autopar.scheduling.programs.order import Order
from autopar.verify.levels import verify

RANKS = 16  # at most, of a golden file's mesh
Values = dict[str, torch.Tensor]


def in_float64(text: str) -> Program:
    """A program with every floating dtype made float64, casts and requirements too, so that only its dataflow
    counts."""
    return read(re.sub(r"\b(f32|bf16|f16)\b", "f64", text))


def random_addends(program: Program) -> Values:
    """For each placeholder one global tensor a rank: the first is its value, or all add up to it where it is
    pending."""
    values: Values = {}
    for node in program.placeholders:
        type = record_of(node).type
        assert isinstance(type, TensorType)
        shape = (RANKS, *type.shape)
        values[node.name] = (
            torch.randn(shape, dtype=type.dtype)
            if type.dtype.is_floating_point
            else torch.randint(0, 2, shape).to(type.dtype)
        )
    return values


def explicit(program: Program) -> Program:
    """The program, brought to the level explicit where it is not."""
    passes: dict[str, list[Pass]] = {
        "traced": [Place(program.mesh or Mesh(dp=2)), Reshard()],
        "placed": [Reshard()],
        "explicit": [],
    }
    run_passes(program, passes[program.level])
    return program


def global_values(program: Program, addends_of: Values) -> Values:
    """What the placeholders of an explicit program are as a whole: one that is pending is the sum of its addends."""
    return {node.name: _whole(record_of(node).type, addends_of[node.name]) for node in program.placeholders}


def on_one_device(program: Program, given: Values) -> list[torch.Tensor]:
    """The results, from global values: a transfer moves values between ranks, and changes none."""
    values: dict[fx.Node, Any] = {}
    for node in program.nodes:
        if node.op == "placeholder":
            values[node] = given[node.name]
        elif node.op == "get_attr":
            values[node] = program.constants[str(node.target)].tensor
        elif node.op == "call_function" and node.target in transfers.BY_FUNCTION:
            values[node] = values[operands(node)[0]]
        elif node.op == "call_function":
            function: Any = ANY_STRIDES.get(node.target, node.target)
            values[node] = function(
                *map_operands(node.args, values.__getitem__), **map_operands(dict(node.kwargs), values.__getitem__)
            )
    return [values[node] for node in operands(program.output)]


def on_simulated_ranks(program: Program, addends_of: Values, order: Order | None = None) -> list[torch.Tensor]:
    """The global results of an explicit program, from the local programs of all ranks, which an order schedules."""
    local = LocalPrograms(program, verify, order)
    assert program.mesh is not None
    values: dict[int, Values] = {rank: {} for rank in program.mesh.ranks}
    for node in program.placeholders:
        for rank, piece in _pieces(record_of(node).type, addends_of[node.name]).items():
            values[rank][node.name] = piece
    code = {rank: compile_phases(local[rank]) for rank in program.mesh.ranks}
    for phase in PHASES:
        run_ranks(program.meshes, {rank: phases.get(phase, []) for rank, phases in code.items()}, values)
    return [_joined(values, node) for node in operands(program.output)]


def _whole(type: Any, values: torch.Tensor) -> torch.Tensor:
    return addends(type, values[: type.layout.mesh.size])[0] if type.attr.pending else values[0]


def _pieces(type: Any, values: torch.Tensor) -> Pieces:
    mesh = type.layout.mesh
    if type.attr.pending:
        return addends(type, values[: mesh.size])[1]
    return {rank: cut(values[0], type, mesh.coordinates(rank)) for rank in mesh.ranks}


def _joined(values: Mapping[int, Values], node: fx.Node) -> torch.Tensor:
    """The global tensor; a result that is returned pending is reduced first."""
    type = record_of(node).type
    assert isinstance(type, TensorType) and type.layout is not None
    mesh = type.layout.mesh
    pieces = {rank: values[rank][node.name] for rank in mesh.ranks}
    for axis, kind in type.attr.pending:
        groups = {
            rank: [pieces[other] for other in mesh.ranks if _differ_along(mesh, rank, other) <= {axis}]
            for rank in mesh.ranks
        }
        pieces = {rank: REDUCE[kind](group) for rank, group in groups.items()}
    return join(pieces, replace(type, layout=Layout(mesh, type.attr.without_pending())), node.name)


def _differ_along(mesh: Mesh, rank: int, other: int) -> set[str]:
    here, there = mesh.coordinates(rank), mesh.coordinates(other)
    return {axis for axis in mesh.names if here[axis] != there[axis]}
