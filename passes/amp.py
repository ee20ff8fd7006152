"""Apply mixed precision, as the dtypes in which ops take their operands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import fx

from autopar.errors import shown
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import DTYPE_NAMES, Requirement, TensorType, ValueType
from autopar.passes.manager import Pass
from autopar.plan.precision.dtypes import Dtypes, low_parameters
from autopar.plan.precision.kernels import check_kernels
from autopar.plan.precision.policy import AmpName, Kept, policy_of

Gradients = Literal["f32", "compute"]  # the dtype in which gradients of parameters leave
GRADIENTS: tuple[Gradients, ...] = get_args(Gradients)


@dataclass(frozen=True)
class Amp(Pass):
    """Decide for each op of a program captured in float32 in which dtype it takes its operands.

    The dtype of its result follows.

        x : f32[8 4] = input                                       x : f32[8 4] = input
        w : f32[4 4] = param                                       w : f32[4 4] = param
        mm : f32[8 4] = mm(x, w)                            →      mm : bf16[8 4] = mm(x as bf16, w as bf16)
        y : f32[8 4] = exp(mm)                                     y : f32[8 4] = exp(mm as f32)

    This pass inserts no casts: ``place`` passes the dtypes on, and ``reshard`` puts the casts where fewer bytes move.
    With O2, parameters that are mostly used in low precision become placeholders of low precision.
    ``low_precision(program)`` lists them, and the caller keeps float32 copies.

    Attributes:
        amp: the policy, ``bf16-O1``, ``fp16-O1``, ``bf16-O2`` or ``fp16-O2``; ``None``: do nothing.
        keep: op by name → ``f32`` or the low precision, instead of the dtype of the policy.
        gradients: the dtype of the gradients of parameters: ``f32``, or ``compute``, the dtype in which they are
            computed.
        device: the device whose op lists and kernels are used.
    """

    name: ClassVar[str] = "amp"
    takes: ClassVar[str] = "traced"
    gives: ClassVar[str] = "traced"

    amp: AmpName | None = None
    keep: Mapping[str, Kept] = field(default_factory=dict)
    gradients: Gradients = "f32"
    device: torch.device | None = None

    def run(self, program: Program) -> list[str]:
        if self.amp is None:
            return []
        policy = policy_of(self.amp, self.keep)
        if self.gradients not in GRADIENTS:
            raise ValueError(f"no gradients={shown(self.gradients)}; they leave in one of {', '.join(GRADIENTS)}")
        for node in program.placeholders:
            check_placeholder(node, policy.name)
        device = "cpu" if self.device is None else self.device.type
        dtypes = Dtypes(program, policy, device, low_parameters(program, policy, device)).run()
        check_kernels(program, dtypes)
        with program.edit() as edit:
            for node, result in dtypes.made.items():
                uses = tuple(None if dtype is None else Requirement(None, dtype) for dtype in dtypes.uses.get(node, ()))
                edit.annotate(node, type=_typed(record_of(node).type, result), uses=uses if any(uses) else ())
            edit.annotate(program.output, uses=self.results(program, dtypes))
        low = Counter(DTYPE_NAMES[dtype] for dtype in low_precision(program).values())
        ran = sum(
            any(dtype == policy.low for dtype in (result if isinstance(result, tuple) else (result,)))
            for node, result in dtypes.made.items()
            if node.op == "call_function"
        )
        return [
            f"{policy.name}: {ran} ops run in {DTYPE_NAMES[policy.low]}"
            + "".join(f"; {n} parameters are {dtype}" for dtype, n in low.items())
        ]

    def results(self, program: Program, found: Dtypes) -> tuple[Requirement | None, ...]:
        """Return the required dtypes of the results.

        Gradients are as in ``gradients``, states in their own dtype, and other values unchanged.
        """
        homes = {node.name: node for node in program.placeholders}
        uses: list[Requirement | None] = []
        for value, result in zip(operands(program.output), record_of(program.output).results, strict=True):
            dtype = found.made[value]
            required = dtype
            if result.kind == "state" or (result.kind == "grad" and record_of(homes[result.of]).role != "param"):
                required = found.made[homes[result.of]]
            elif result.kind == "grad" and self.gradients == "f32":
                required = torch.float32
            uses.append(
                Requirement(None, required) if isinstance(required, torch.dtype) and required != dtype else None
            )
        return tuple(uses) if any(uses) else ()


def low_precision(program: Program) -> dict[str, torch.dtype]:
    """Return the parameters that a program takes in low precision, name → dtype."""
    parameters = {}
    for node in program.placeholders:
        record = record_of(node)
        if (
            record.role == "param"
            and isinstance(record.type, TensorType)
            and record.type.dtype in (torch.bfloat16, torch.float16)
        ):
            parameters[record.name or node.name] = record.type.dtype
    return parameters


def check_placeholder(node: fx.Node, amp: str) -> None:
    """Raise ``ValueError`` for a model that is not in float32."""
    record = record_of(node)
    type = record.type
    assert isinstance(type, TensorType)
    is_checked = record.role in ("param", "input", "buffer", "state")
    if is_checked and (
        type.dtype.is_complex
        or type.dtype == torch.float64
        or (record.role == "param" and type.dtype.is_floating_point and type.dtype != torch.float32)
    ):
        kind = {"param": "parameter", "input": "input"}.get(record.role, "buffer")
        raise ValueError(
            f"amp={shown(amp)} is for a model and data in float32; the {kind} {record.name or node.name} is "
            f"{DTYPE_NAMES[type.dtype]}\n"
            f"  make it float32: model.float(); or leave amp=None, and the step runs in the model's own dtypes"
        )


def _typed(type: ValueType, dtypes: object) -> ValueType:
    """Return a type with other dtypes."""
    if isinstance(type, tuple):
        assert isinstance(dtypes, tuple)
        return tuple(_typed_part(part, dtype) for part, dtype in zip(type, dtypes, strict=True))
    return _typed_part(type, dtypes)


def _typed_part(type: TensorType | None, dtype: object) -> TensorType | None:
    if type is None:
        return None
    assert isinstance(dtype, torch.dtype)
    return type if type.dtype == dtype else replace(type, dtype=dtype)
