"""Place a program of all stages: on the mesh of one stage first; then each value gets its stage (``passes.spread``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.model.compiled import Compiler
from autopar.passes import OnStages
from autopar.report.passes import PassReport
from autopar.scheduling.programs.order import OF_STEPS, Execution
from autopar.step.compiling.compiled_step import Placed, about
from autopar.step.pipelined.placing.joined import check_profile
from autopar.verify.levels import verify


class Traced(NamedTuple):
    """A traced program of all stages.

    Attributes:
        program: the program, which becomes explicit.
        constraints: placeholder → its layout.
        stages: placeholder → its stage; the others are on the whole mesh.
    """

    program: Program
    constraints: Mapping[str, DistAttr]
    stages: Mapping[str, str]


def place_on_stages(
    compiler: Compiler, traced: Traced, on: OnStages, mesh: Mesh, device: torch.device,
    execution: Execution = OF_STEPS,
) -> tuple[Placed, list[PassReport]]:  # fmt: skip
    """Place a program of all stages, and make each rank's program of it.

    Args:
        on: the whole mesh and its stages.
        mesh: that of one stage.
        execution: how it runs.
    """
    reports, _ = replace(compiler, mesh=mesh).through_passes(
        traced.program, traced.constraints, device, stages=on._replace(of=traced.stages)
    )
    check_profile(compiler, traced.program)
    local, more = replace(compiler, mesh=on.mesh).localize(traced.program, execution)
    return (traced.program, local), [*reports, *more]


def place_around(
    compiler: Compiler, traced: Mapping[str, Traced | None], on: OnStages, mesh: Mesh, device: torch.device
) -> tuple[dict[str, Placed], list[PassReport]]:
    """Place the programs of all stages around the passes, by name. Returns those that there are, and the reports.

    The other arguments are those of ``place_on_stages``.
    """
    placed, reports = {}, list[PassReport]()
    for name, program in traced.items():
        if program is not None:
            verify(program.program, name)
            own = replace(compiler, whole=name == "gradients" or (name == "share" and compiler.whole))
            placed[name], more = place_on_stages(own, program, on, mesh, device)
            reports += about(name, more)
    return placed, reports
