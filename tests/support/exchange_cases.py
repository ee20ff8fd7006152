"""Make cases of transfers: the programs, their inputs, and what the simulator returns."""

from __future__ import annotations

import torch
from transition_runs import addends, explicit_program, run

from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.runtime.localize import localize

Case = tuple[tuple[list[str], list[torch.Tensor | None]], list[torch.Tensor | None]]


def case(source: TensorType, target: TensorType, values: torch.Tensor, world: Mesh | None = None) -> Case:
    """The local programs and pieces of all ranks, and what the simulator gives."""
    program = explicit_program(source, target, world)
    _, pieces = addends(source, values)
    wanted = run(source, target, dict(pieces), world)
    every = sorted(program.mesh.ranks)
    texts = [str(localize(program, program.mesh.coordinates(rank))) for rank in every]
    return (texts, [pieces.get(rank) for rank in every]), [wanted.get(rank) for rank in every]
