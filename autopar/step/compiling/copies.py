"""Make the program of the low-precision copies of parameters, which ``micro`` computes with.

The parameters themselves stay in float32 (master weights). With ZeRO they have the layout of the optimizer's state.

    up_weight : f32[256/tp 64/dp] = param('up.weight')
    up_weight_copy : bf16[256/tp 64] = state(up_weight_copy_next_dp, 'up.weight.copy')
    update:
      up_weight_copy_next : bf16[256/tp 64/dp] = _to_copy(up_weight, dtype=bf16)
      up_weight_copy_next_dp : bf16[256/tp 64] = all_gather(up_weight_copy_next, 1, dp)

The copies are made when a step begins, and not at the end of the step before it, so that they follow what was written
to a parameter between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.ir.layout import DistAttr
from autopar.ir.program import Program
from autopar.ir.record import Record, TensorType
from autopar.ir.value_names import copy_name
from autopar.step.compiling.graph_builder import GraphBuilder


def copy_program(
    parameters: Mapping[str, TensorType], copies: Mapping[str, TensorType], device: torch.device
) -> tuple[Program, dict[str, DistAttr]]:
    """Make the traced program of the copies, and the layouts of its placeholders.

    Args:
        parameters: the types of the float32 parameters, by name.
        copies: the types of their low-precision copies, by the name of the parameter.
    """
    builder = GraphBuilder(device)
    builder.phase = "update"
    constraints: dict[str, DistAttr] = {}
    replaced = {}
    sources = {
        name: builder.placeholder(
            name, _about(name)._replace(type=TensorType(type.shape, type.dtype), role="param", name=name)
        )
        for name, type in parameters.items()
    }
    targets = {
        name: builder.placeholder(
            copy_name(name), Record(TensorType(t.shape, t.dtype), role="state", name=copy_name(name))
        )
        for name, t in copies.items()
    }
    for name, copy in targets.items():
        builder.about = _about(name)
        constraints |= {sources[name].name: parameters[name].attr, copy.name: copies[name].attr}
        replaced[copy] = builder.inline(torch.Tensor.to, sources[name], copies[name].dtype, name=f"{copy.name}_next")
    return builder.program((), replaced), constraints


def _about(parameter: str) -> Record:
    return Record(None, module=parameter.rpartition(".")[0], source="low-precision copy")
