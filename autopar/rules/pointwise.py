"""Ops that work element by element, and their backward ops (also element by element)."""

from __future__ import annotations

import torch

from autopar.rules.registry import overload, rule

rule("... -> ...", "neg clone alias detach", linear="0")
rule("... -> ...", "mul.Scalar div.Scalar", linear="0")
rule("... -> ...", """
    exp exp2 expm1 log log1p log2 log10 sqrt rsqrt reciprocal square abs sign sgn floor ceil round trunc frac
    sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc erfinv lgamma digamma polygamma sinc logit
    relu gelu silu sigmoid elu celu leaky_relu hardtanh hardsigmoid hardswish hardshrink softshrink softplus mish
    add.Scalar sub.Scalar rsub.Scalar pow.Tensor_Scalar pow.Scalar remainder.Scalar fmod.Scalar
    clamp clamp_min clamp_max threshold nan_to_num isnan isinf logical_not bitwise_not
    eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar
""")  # fmt: skip

rule("..., ... -> ...", "add.Tensor sub.Tensor", linear="0+1")
rule("..., ... -> ...", "mul.Tensor", linear="0, 1")
rule("..., ... -> ...", "div.Tensor", linear="0")
rule("..., ... -> ...", """
    pow.Tensor_Tensor maximum minimum atan2 hypot logaddexp xlogy.Tensor remainder.Tensor fmod.Tensor
    div.Tensor_mode floor_divide clamp_min.Tensor clamp_max.Tensor _prelu_kernel logical_and logical_or logical_xor
    bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor
    eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor
""")
rule("..., ..., ... -> ...", "where.self", linear="1+2")
rule("..., ..., ... -> ...", "clamp.Tensor")
rule("..., ... -> ...", "lerp.Scalar", linear="0+1")
rule("..., ..., ... -> ...", "lerp.Tensor", linear="0+1")
rule("..., ..., ... -> ...", "addcmul", linear="0+1, 0+2")
rule("..., ..., ... -> ...", "addcdiv", linear="0+1")
rule("..., ... -> ...", "masked_fill.Scalar")
rule("... -> ...", "fill.Scalar")
rule("..., () -> ...", "fill.Tensor", linear="1")
rule("..., ..., () -> ...", "masked_fill.Tensor")
rule("..., ... -> ...", "copy", linear="1")

# gradient first, then what the forward saved: linear in the gradient
rule("..., ... -> ...", """
    threshold_backward gelu_backward silu_backward tanh_backward sigmoid_backward elu_backward leaky_relu_backward
    hardtanh_backward hardsigmoid_backward hardswish_backward hardshrink_backward softshrink_backward
    softplus_backward mish_backward logit_backward
""", linear="0")  # fmt: skip
rule("..., ..., ... -> ..., ...", "_prelu_kernel_backward", linear="0")


def _widens(x, *, dtype=None, **_) -> str:
    """A cast is linear when no value is rounded: a narrowing one does not commute with the sum."""
    return "0" if dtype is None or torch.promote_types(x.dtype, dtype) == dtype else ""


CASTS = frozenset({overload("_to_copy")})

rule("... -> ...", "_to_copy", linear=_widens)
