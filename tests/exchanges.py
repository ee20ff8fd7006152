"""Lowered local programs on each rank of real processes, given as text and pieces."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import distributed

from autopar.dtensor import device_mesh_of
from autopar.mesh import Mesh
from autopar.program import Program
from autopar.runtime.job import groups_of
from autopar.runtime.lower import lower


@functools.cache
def groups(mesh: Mesh) -> dict[tuple[int, ...], str]:
    return groups_of(mesh, device_mesh_of(mesh))


def run_lowered(cases: Sequence[tuple[Sequence[str], Sequence[torch.Tensor]]]) -> list[torch.Tensor]:
    """For each case, given as the text and the piece of each rank: what this rank holds in the end."""
    rank = distributed.get_rank()
    found = []
    for texts, pieces in cases:
        program = Program.parse(texts[rank])
        forward = lower(program, groups(program.mesh))["forward"]
        boxed = [pieces[rank]]
        (result,) = forward.run(boxed)
        assert not boxed, "the list has been emptied"
        found.append(result)
    return found


def text_of_lowered(text: str, rank: int) -> str:
    """The generated code of the phases."""
    program = Program.parse(text)
    if distributed.get_rank() != rank:
        return ""
    return "\n".join(phase.graph.python_code("self").src for phase in lower(program, groups(program.mesh)).values())
