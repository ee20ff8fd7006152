"""Copy: the low-precision copies of parameters that ``micro`` computes with. Parameters themselves stay in float32 (master weights), and
with ZeRO lie as the optimizer's state does.

    up_weight : f32[256/tp 64/dp] = param('up.weight')
    up_weight_copy : bf16[256/tp 64] = state(up_weight_copy_next_dp, 'up.weight.copy')
    update:
      up_weight_copy_next : bf16[256/tp 64/dp] = _to_copy(up_weight, dtype=bf16)
      up_weight_copy_next_dp : bf16[256/tp 64] = all_gather(up_weight_copy_next, 1, dp)

They are made when a step begins, and not when the one before ends: whoever has written to a parameter in between is heard.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.ir.layout import DistAttr
from autopar.ir.program import Program
from autopar.ir.record import Record, TensorType
from autopar.ir.value_names import copy_name
from autopar.step.graph_builder import Assembly


def copy_program(parameters: Mapping[str, TensorType], copies: Mapping[str, TensorType], device: torch.device) -> tuple[Program, dict[str, DistAttr]]:
    """The traced program that makes the copies, and how its placeholders lie.

    Args:
        parameters, copies: their types, by the name of the parameter.
    """
    made = Assembly(device)
    made.phase = "update"
    constraints: dict[str, DistAttr] = {}
    replaced = {}
    sources = {name: made.placeholder(name, Record(TensorType(type.shape, type.dtype), role="param", name=name)) for name, type in parameters.items()}
    targets = {name: made.placeholder(copy_name(name), Record(TensorType(t.shape, t.dtype), role="state", name=copy_name(name))) for name, t in copies.items()}
    for name, copy in targets.items():
        constraints |= {sources[name].name: parameters[name].attr, copy.name: copies[name].attr}
        replaced[copy] = made.inline(torch.Tensor.to, sources[name], copies[name].dtype, name=f"{copy.name}_next")
    return made.program((), replaced), constraints
