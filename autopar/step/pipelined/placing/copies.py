"""Make the program before the micro-batches, which copies parameters: in low precision, and to stages that read them.

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
from torch import fx

from autopar.ir.layout import DistAttr
from autopar.ir.mesh import stage_name
from autopar.ir.record import Record, TensorType
from autopar.ir.value_names import gradient_name
from autopar.model.stage_homes import StageHomes
from autopar.step.compiling.copies import Copy, copy_program
from autopar.step.compiling.graph_builder import GraphBuilder
from autopar.step.pipelined.placing.on_stages import Traced
from autopar.step.pipelined.placing.programs import CutStage
from autopar.torch_private import aten


def traced_copies(
    stages: Sequence[CutStage], homes: StageHomes, device: torch.device,
    copied: Mapping[str, tuple[TensorType, TensorType]] | None = None,
) -> Traced | None:  # fmt: skip
    """Make the traced program; ``None`` if no stage takes a copy.

    Args:
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
    at = {name: stage_name(homes.stage[name]) for name in parameters}
    return Traced(*copy_program(parameters, copies, device, at)) if copies else None


def traced_home(
    stages: Sequence[CutStage], homes: StageHomes, gradients: Mapping[str, Sequence[int]], device: torch.device
) -> Traced | None:
    """Make the traced program of a call that adds the gradients of tied parameters on the stages that keep these.

    In a step, the update does that. ``gradients``: parameter → the stages on which its gradient adds up. ``None`` if
    each adds up on its home alone.

    w : f32[8 4] @s0 = param
    w_grad : f32[8 4] @s0 = state(w_grad_all, 'w.grad')
    w_grad_1 : f32[8 4] @s1 = buffer('w.grad')
    update:
      … = send(w_grad_1, s0)
      w_grad_all : f32[8 4] @s0 = add.Tensor(w_grad, …)
    """
    builder = GraphBuilder(device)
    builder.phase = "update"
    constraints: dict[str, DistAttr] = {}
    at: dict[str, str] = {}
    states: dict[fx.Node, fx.Node] = {}

    def placeholder(name: str, type: TensorType, role: str, stage: int) -> fx.Node:
        node = builder.placeholder(name, Record(TensorType(type.shape, type.dtype), role=role, name=name))
        constraints[node.name], at[node.name] = type.attr, stage_name(stage)
        return node

    for parameter, readers in gradients.items():
        home, name = homes.stage[parameter], gradient_name(parameter)
        others, type = [stage for stage in readers if stage != home], stages[readers[0]].types[name]
        if not others:
            continue
        placeholder(parameter, type, "param", home)  # so that the sums are known as those of its gradients
        kept = placeholder(name, type, "state", home)
        for stage in others:
            other = placeholder(name, type, "buffer", stage)
            total = states.get(kept, kept)
            states[kept] = builder.inline(aten.add.Tensor, total, other, name=f"{kept.name}_all")
    return Traced(builder.program((), states), constraints, at) if states else None
