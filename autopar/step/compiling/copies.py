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

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx

from autopar.ir.layout import DistAttr
from autopar.ir.program import Program
from autopar.ir.record import Record, TensorType
from autopar.ir.value_names import copy_name
from autopar.step.compiling.graph_builder import GraphBuilder


class Copy(NamedTuple):
    """A copy of a parameter.

    Attributes:
        name: the name of the parameter.
        type: the type of the copy.
        stage: the stage of a pipeline that reads it; "" without stages.
    """

    name: str
    type: TensorType
    stage: str = ""


class CopyProgram(NamedTuple):
    """The traced program of the copies.

    Attributes:
        program: the program.
        constraints: placeholder → its layout.
        stages: placeholder → its stage, of those that are on one.
    """

    program: Program
    constraints: Mapping[str, DistAttr]
    stages: Mapping[str, str]


def copy_program(
    parameters: Mapping[str, TensorType], copies: Sequence[Copy], device: torch.device, homes: Mapping[str, str] = {}
) -> CopyProgram:
    """Make the traced program of the copies.

    Args:
        parameters: the types of the parameters between steps, by name.
        copies: the copies. A stage that does not keep a parameter takes a copy of it, also in its own dtype.
        homes: parameter → the stage that keeps it.
    """
    builder = GraphBuilder(device)
    builder.phase = "update"
    constraints: dict[str, DistAttr] = {}
    stages: dict[str, str] = {}

    def placeholder(name: str, type: TensorType, record: Record, stage: str) -> fx.Node:
        node = builder.placeholder(name, record._replace(type=TensorType(type.shape, type.dtype), name=name))
        constraints[node.name] = type.attr
        if stage:
            stages[node.name] = stage
        return node

    sources = {
        name: placeholder(name, type, _about(name)._replace(role="param"), homes.get(name, ""))
        for name, type in parameters.items()
    }
    targets = [
        (placeholder(copy_name(copy.name), copy.type, Record(None, role="state"), copy.stage), copy) for copy in copies
    ]
    casts: dict[tuple[str, torch.dtype], fx.Node] = {}
    for target, (name, type, _) in targets:
        builder.about = _about(
            name, "low-precision copy" if type.dtype != parameters[name].dtype else "copy on another stage"
        )
        if (name, type.dtype) not in casts:
            casts[name, type.dtype] = builder.inline(
                torch.Tensor.to, sources[name], type.dtype, name=f"{target.name}_next"
            )
    replaced = {target: casts[copy.name, copy.type.dtype] for target, copy in targets}
    return CopyProgram(builder.program((), replaced), constraints, stages)


def _about(parameter: str, source: str = "") -> Record:
    return Record(None, module=parameter.rpartition(".")[0], source=source)
