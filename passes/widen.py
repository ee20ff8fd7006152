"""Widen pending values of low precision, so that they are reduced in float32."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from autopar.ir.edit import Value
from autopar.ir.nodes import operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import Requirement, TensorType
from autopar.passes.manager import Pass
from autopar.rules.pointwise import CASTS
from autopar.torch_private import aten

(CAST,) = CASTS
ADDED = (aten.add.Tensor, aten.sub.Tensor)  # these ops widen operands of low precision themselves
LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Widen(Pass):
    """Cast a pending value of low precision to float32 before the uses that need it reduced.

    The dtypes of the uses stay.

        mm : bf16[8 4] +tp = mm(x, w)                               mm : bf16[8 4] +tp = mm(x, w)
        y : bf16[8 4] = relu(mm as [8 4])                   →       wide : f32[8 4] +tp = _to_copy(mm, dtype=f32)
                                                                    y : bf16[8 4] = relu(wide as bf16[8 4])

        t : bf16[8 4] +dp = t(mm_1)                                 t : bf16[8 4] +dp = t(mm_1)
        sum : f32[8/dp 4] = add.Tensor(g, t as [8/dp 4])    →       wide : f32[8 4] +dp = _to_copy(t, dtype=f32)
                                                                    sum : f32[8/dp 4] = add.Tensor(g, wide as f32[8/dp
                                                                    4])

    A pending value is never narrowed, so ``reshard`` inserts a reduction in float32 and then a cast. An addition in
    float32 reads the float32 value, so that a gradient is not rounded once more before it is added to its sum. The pass
    runs before ``reshard``. It is for groups so large that addends with 8 or 11 bits of precision round too much; the
    reductions then have twice the bytes.
    """

    name: ClassVar[str] = "widen"
    takes: ClassVar[str] = "placed"
    gives: ClassVar[str] = "placed"

    def run(self, program: Program) -> None:
        with program.edit() as edit:
            wide: dict[fx.Node, Value] = {}
            for user in program.nodes:
                uses = list(record_of(user).uses)
                for k, (value, need) in enumerate(zip(operands(user), record_of(user).uses, strict=False)):
                    if need is None or not _reduces(value, need):
                        continue
                    if value not in wide:
                        type = record_of(value).type
                        assert isinstance(type, TensorType) and type.layout is not None
                        wide[value] = edit.insert(CAST, (value,), {"dtype": torch.float32}, before=value.next,
                                                  type=replace(type, dtype=torch.float32), phase=record_of(value).phase,
                                                  uses=(Requirement(type.layout, type.dtype),),
                                                  name=f"{value.name}_wide", about=value)  # fmt: skip
                    edit.replace_use(user, value, wide[value], index=k)
                    if user.target in ADDED and tensor_type(user).dtype == torch.float32:
                        uses[k] = replace(need, dtype=torch.float32)
                edit.annotate(user, uses=tuple(uses))


def _reduces(value: fx.Node, need: Requirement) -> bool:
    """Return whether a use needs a pending sum of low precision reduced.

    A maximum is one of the values: reducing it rounds nothing.
    """
    type = record_of(value).type
    if not isinstance(type, TensorType) or type.dtype not in LOW or need.layout is None:
        return False
    return any(kind == "sum" for _, kind in set(type.attr.pending) - set(need.layout.attr.pending))
