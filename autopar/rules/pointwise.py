"""Ops that work element by element, and their backward ops (also element by element)."""

from __future__ import annotations

import torch

from autopar.rules.registry import rule

rule("... -> ...", "neg clone alias detach", linear="0")
rule("... -> ...", "mul.Scalar div.Scalar", linear="0")
rule("... -> ...", """
    relu gelu silu tanh sigmoid exp exp2 expm1 log log1p log2 sqrt rsqrt reciprocal abs sign sin cos erf square
    elu leaky_relu hardtanh hardsigmoid hardswish softplus mish logical_not bitwise_not isnan floor ceil round
    add.Scalar sub.Scalar pow.Tensor_Scalar clamp clamp_min clamp_max threshold
    eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar
""")  # fmt: skip

rule("..., ... -> ...", "add.Tensor sub.Tensor", linear="0+1")
rule("..., ... -> ...", "mul.Tensor", linear="0, 1")
rule("..., ... -> ...", "div.Tensor", linear="0")
rule("..., ... -> ...", """
    pow.Tensor_Tensor maximum minimum atan2 remainder.Tensor logical_and logical_or logical_xor
    bitwise_and.Tensor bitwise_or.Tensor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor
""")
rule("..., ..., ... -> ...", "where.self", linear="1+2")
rule("..., ..., ... -> ...", "addcmul", linear="0+1, 0+2")
rule("..., ..., ... -> ...", "addcdiv", linear="0+1")
rule("..., ... -> ...", "masked_fill.Scalar")

# gradient first, then what the forward saved: linear in the gradient
rule("..., ... -> ...", """
    threshold_backward gelu_backward silu_backward tanh_backward sigmoid_backward elu_backward leaky_relu_backward
    hardtanh_backward hardsigmoid_backward hardswish_backward softplus_backward mish_backward
""", linear="0")  # fmt: skip


def _widens(x, *, dtype=None, **_) -> str:
    """A cast is linear when no value is rounded: a narrowing one does not commute with the sum."""
    return "0" if dtype is None or torch.promote_types(x.dtype, dtype) == dtype else ""


rule("... -> ...", "_to_copy", linear=_widens)
