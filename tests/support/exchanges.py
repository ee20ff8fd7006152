"""Lowered local programs on each rank of real processes, given as text and pieces."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from processes import device_mesh
from torch import distributed

from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.runtime.lowering.lower import lower
from autopar.runtime.processes.groups import DATA, process_groups
from autopar.runtime.processes.job import groups_of


@functools.cache
def groups(mesh: Mesh) -> dict[tuple[int, ...], str]:
    return groups_of(mesh, device_mesh(mesh), process_groups(), [])


@functools.cache
def every_group(count: int) -> dict[tuple[int, ...], str]:
    """A group of any ranks, for meshes that are stages; all ranks make all, in one order."""
    found = {}
    for size in range(2, count + 1):
        for ranks in itertools.combinations(range(count), size):
            others = tuple(rank for rank in range(count) if rank not in ranks)
            group = process_groups().take(DATA, [ranks, others] if others else [ranks], [])
            if distributed.get_rank() in ranks:
                found[ranks] = group.group_name
    return found


def run_lowered(cases: Sequence[tuple[Sequence[str], Sequence[torch.Tensor | None]]]) -> list[torch.Tensor | None]:
    """For each case, given as the text and the piece of each rank: what this rank holds in the end."""
    rank = distributed.get_rank()
    found: list[torch.Tensor | None] = []
    for texts, pieces in cases:
        program, piece = Program.parse(texts[rank]), pieces[rank]
        forward = lower(program, every_group(len(pieces)) if program.stages else groups(program.mesh))["forward"]
        boxed = [] if piece is None else [piece]
        found += forward.run(boxed) or [None]
        assert not boxed, "the list has been emptied"
    return found


def redistributed_by_dtensor(
    cases: Sequence[tuple[Sequence[torch.Tensor], tuple[int, ...], Any, Any]], mesh: Mesh
) -> list[torch.Tensor]:
    """For each case, given as the pieces of all ranks, the global shape, and placements before and after."""
    from torch.distributed.tensor import DTensor

    rank = distributed.get_rank()
    found = []
    for pieces, shape, before, after in cases:
        strides = torch.empty(shape, device="meta").stride()
        value = DTensor.from_local(
            pieces[rank], device_mesh(mesh), before, shape=torch.Size(shape), stride=strides, run_check=False
        )
        found.append(value.redistribute(placements=after).to_local().contiguous())
    return found


def text_of_lowered(text: str, rank: int) -> str:
    """The generated code of the phases."""
    program = Program.parse(text)
    names = groups(program.mesh)  # all ranks make them
    if distributed.get_rank() != rank:
        return ""
    return "\n".join(phase.graph.python_code("self").src for phase in lower(program, names).values())
