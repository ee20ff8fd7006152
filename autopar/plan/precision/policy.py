"""Define the policies of mixed precision: which op runs in which dtype."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import torch

from autopar.errors import RuleError, shown
from autopar.plan.precision.autocast import F32, LOW, WIDEST, named
from autopar.rules.registry import overload


class Kind(Enum):
    """The dtype in which an op runs.

    ``INSIDE`` is float32 for an op that takes low precision and computes internally in float32; its readers see the
    dtype that it takes. ``PROMOTED`` leaves operands unchanged, because torch promotes their dtypes itself. All others
    require one dtype for all operands.
    """

    LOW = "low"
    F32 = "f32"
    INSIDE = "inside"
    WIDEST = "widest"
    PROMOTED = "promoted"


# if they are on no list
INSIDE = named("_softmax _log_softmax native_layer_norm native_group_norm _fused_rms_norm logsumexp")

NAMED = named("_softmax _log_softmax")  # an argument of their backward names the dtype of the forward

PROMOTED = named("""
    add sub rsub mul div where maximum minimum fmax fmin eq ne lt le gt ge _to_copy clone fill masked_fill
""")  # fmt: skip


@dataclass(frozen=True)
class PrecisionPolicy:
    """A policy of mixed precision, such as ``amp="bf16-O1"``.

    Attributes:
        name: its name.
        low: the dtype of low precision.
        parameters: whether parameters and inputs are in low precision from the start (O2), and not only for the ops
            that benefit from it (O1, as under ``torch.autocast``).
        kept: op → the kind that the user has chosen.
    """

    name: str
    low: torch.dtype
    parameters: bool
    kept: Mapping[str, Kind] = field(default_factory=dict)

    def kind(self, op: str, device: str) -> Kind:
        """Return the kind of an op. ``op`` is its name with or without overload.

        Other accelerators have CUDA's lists.
        """
        name = op.partition(".")[0]
        device = "cpu" if device == "cpu" else "cuda"
        if (chosen := self.kept.get(op) or self.kept.get(name)) is not None:
            return chosen
        if name in LOW[device]:
            return Kind.LOW
        if name in INSIDE and (self.parameters or name not in F32[device]):
            return Kind.INSIDE
        if name in F32[device] or (self.parameters and name in F32["cuda"]):
            return Kind.F32
        return Kind.PROMOTED if name in PROMOTED and name not in WIDEST[device] else Kind.WIDEST


POLICIES: dict[str, PrecisionPolicy] = {
    policy.name: policy
    for policy in (
        PrecisionPolicy("bf16-O1", torch.bfloat16, False),
        PrecisionPolicy("fp16-O1", torch.float16, False),
        PrecisionPolicy("bf16-O2", torch.bfloat16, True),
        PrecisionPolicy("fp16-O2", torch.float16, True),
    )
}
ALIASES = {"bf16": "bf16-O1", "fp16": "fp16-O1"}
AmpName = Literal["bf16-O1", "fp16-O1", "bf16-O2", "fp16-O2", "bf16", "fp16"]  # a policy, or an alias of one
Kept = Literal["f32", "bf16", "f16"]  # the dtype of an op that the user chooses


def policy_of(amp: AmpName, keep: Mapping[str, Kept] | None = None) -> PrecisionPolicy:
    """Return a policy by name, with the user's choices for single ops.

    Example: ``policy_of("fp16-O1", keep={"aten::tanh": "f32"})``.

    Raises:
        ValueError: there is no such policy, or no such dtype.
        RuleError: torch has no such op.
    """
    name = ALIASES.get(amp, amp) if isinstance(amp, str) else amp
    if name not in POLICIES:
        known = [*POLICIES, *ALIASES]
        near = difflib.get_close_matches(amp, known, n=2) if isinstance(amp, str) else []
        raise ValueError(
            f"no amp={shown(amp)}; {'near it' if near else 'there are'}: {', '.join(near or [*known, 'None'])}"
        )
    policy = POLICIES[name]
    chosen = {(name := _op(op)): _kind(name, dtype, policy) for op, dtype in (keep or {}).items()}
    return PrecisionPolicy(policy.name, policy.low, policy.parameters, chosen)


def _op(name: str) -> str:
    try:
        return overload(name).name()
    except RuleError:
        packet = name.removeprefix("aten::")
        if "." not in name and hasattr(torch.ops.aten, packet):  # all of its overloads
            return f"aten::{packet}"
        raise


def _kind(op: str, dtype: str, policy: PrecisionPolicy) -> Kind:
    low = {torch.bfloat16: "bf16", torch.float16: "f16"}[policy.low]
    kinds = {"f32": Kind.F32, low: Kind.LOW}
    if dtype not in kinds:
        raise ValueError(
            f"keep={{{op!r}: {dtype!r}}}: with {policy.name} an op runs in {' or '.join(map(repr, kinds))}"
        )
    if dtype == low and op.partition(".")[0] in NAMED:
        raise ValueError(
            f"keep={{{op!r}: {dtype!r}}}: its backward names the dtype that it was captured in, so it runs in float32"
        )
    return kinds[dtype]
