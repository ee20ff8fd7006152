"""Compile steps that start communication early, and read the code that they become."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from presets import preset_of
from torch import nn
from whole_programs import Pieces, WholeProgram

import autopar
from autopar import Mesh
from autopar.runtime.lowering.lower import lower_function
from autopar.scheduling.programs.donated import Donated
from autopar.scheduling.programs.run_parts import part_of


class AnyGroup(dict[Any, str]):
    def __missing__(self, ranks: Any) -> str:
        return "group"


def made(model: nn.Module, mesh: Mesh, plan: Any = None, **options: Any) -> Any:
    """A step in the order of the policy ``today``, unless the options have another."""
    parallel = autopar.parallelize(model, mesh, preset_of(mesh.names) if plan is None else plan)
    return parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=1e-2), **{"overlap": "today", **options})


def code(step: Any, *args: Any, **batch: Any) -> list[str]:
    """The lines of the function that the last micro-batch and the update are, on rank 0."""
    step.capture(*args, **batch)
    update = step._current().update
    last, locals = update.last
    found = WholeProgram(last, locals)
    written = [of for name, of in found.named.items() if name in update.states or name in found.sums]
    zeros = [found.named[name] for name in found.sums]
    donated = Donated.of(locals[0], written, zeros)
    graph = lower_function(part_of(locals[0], "whole"), locals[0], AnyGroup(), donated=donated).graph
    return graph.python_code("self").src.splitlines()


def places(lines: list[str], what: str) -> list[int]:
    return [k for k, line in enumerate(lines) if re.search(what, line)]


def text() -> dict[str, torch.Tensor]:
    ids = torch.randint(22, (8, 8))
    return {"input_ids": ids, "labels": ids}


def random_pieces(run: WholeProgram, known: Mapping[int, Pieces]) -> dict[int, Pieces]:
    """Numbers for all placeholders of all ranks, but those that are known, by the user's names."""
    found = {}
    mesh = run.interface.mesh
    for rank in mesh.ranks:
        own = {}
        for name, of in run.named.items():
            type, at = run.interface.types[of], mesh.coordinates(rank)
            shape = type.attr.local_shape(type.shape, mesh, at)
            generator = torch.Generator().manual_seed(len(name) * 100 + rank)
            drawn = (
                torch.rand(shape, generator=generator, dtype=torch.float64) / 2 + 0.25
                if type.dtype.is_floating_point
                else torch.randint(9, shape, generator=generator)
            )
            own[of] = known[rank][name].clone() if name in known.get(rank, {}) else drawn.to(type.dtype)
        found[rank] = own
    return found


def named(run: WholeProgram, pieces: Mapping[str, torch.Tensor]) -> Pieces:
    return {run.names[of]: tensor for of, tensor in pieces.items()}
