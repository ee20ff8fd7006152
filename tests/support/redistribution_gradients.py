"""Run redistributions on each rank of real processes, and differentiate through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from exchanges import groups
from torch import distributed

from autopar import Mesh
from autopar.ir.nodes import record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.runtime.redistribute import Redistribution

MESH = Mesh(dp=2, tp=2)


def read(text: str, mesh: Mesh = MESH) -> TensorType:
    """``f32[4/dp 8] +tp`` as a type."""
    program = Program.parse(f"program placed on {mesh}\n  x : {text} = input\n  return x\n")
    return record_of(program.node("x")).type


def run_and_differentiate(
    cases: Sequence[tuple[str, str, Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]]],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What this rank gets of each redistribution, and the gradient of what it gave."""
    rank, found = distributed.get_rank(), []
    for before, after, pieces, gradients in cases:
        redistribution = Redistribution(read(before), read(after)).on(rank, groups(MESH))
        piece = pieces[rank].clone().requires_grad_()
        made = redistribution(piece)
        made.backward(gradients[rank])
        found.append((made.detach(), piece.grad))
    return found


def there_and_back(
    source: TensorType, target: TensorType, pieces: Mapping[int, torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    rank = distributed.get_rank()
    redistribution = Redistribution(source, target)
    if rank not in redistribution.program.mesh:
        return None, None
    here = redistribution.on(rank, {})
    there = here(pieces.get(rank))
    return there, here.backward(there)
