"""Compile the program before the passes, which copies parameters: in low precision, and to stages that only read them.

embed_weight : f32[64 16] @s0 = param('embed.weight')
embed_weight_copy : bf16[64 16] @s0 = state(embed_weight_copy_next, 'embed.weight.copy')
embed_weight_copy_1 : bf16[64 16] @s1 = state(embed_weight_copy_next_s1_s1, 'embed.weight.copy')
update:
  embed_weight_copy_next : bf16[64 16] @s0 = _to_copy(embed_weight, dtype=bf16)
  embed_weight_copy_next_s1 : bf16[64 16] @s0 = send(embed_weight_copy_next, s1)
  embed_weight_copy_next_s1_s1 : bf16[64 16] @s1 = recv(embed_weight_copy_next_s1, s1, splits=((), ()))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from autopar.ir.mesh import stage_name
from autopar.ir.record import TensorType
from autopar.model.compiled import Compiler
from autopar.model.stage_homes import StageHomes
from autopar.passes import OnStages
from autopar.report.passes import PassReport
from autopar.step.compiling.compiled_step import Placed
from autopar.step.compiling.copies import Copy, copy_program
from autopar.step.pipelined.placing.on_stages import Traced, place_on_stages
from autopar.step.pipelined.placing.programs import CutStage


def compile_copies(
    compiler: Compiler, on: OnStages, stages: Sequence[CutStage], homes: StageHomes, device: torch.device,
    copied: Mapping[str, tuple[TensorType, TensorType]] | None = None,
) -> tuple[Placed | None, list[PassReport]]:  # fmt: skip
    """Compile the program; ``None`` if no stage takes a copy.

    Args:
        on: the whole mesh and its stages.
        homes: where the parameters are.
        copied: parameter → its type between steps, and that of the copy which its own stage takes.
    """
    copied = copied or {}
    parameters = {name: master for name, (master, _) in copied.items()}
    copies = [Copy(name, type, stage_name(homes.stage[name])) for name, (_, type) in copied.items()]
    for stage in stages:
        for name in stage.parameters:
            home = homes.stage.get(name, stage.number)
            if home != stage.number:
                type = stage.types[name]
                kept = replace(stages[home].types.get(name, type), layout=homes.layouts[name])
                parameters.setdefault(name, kept)
                copies.append(Copy(name, type, stage_name(stage.number)))
    if not copies:
        return None, []
    at = {name: stage_name(homes.stage[name]) for name in parameters}
    made = copy_program(parameters, copies, device, at)
    return place_on_stages(replace(compiler, whole=False), "copy", Traced(*made), on, stages[0].mesh, device)
