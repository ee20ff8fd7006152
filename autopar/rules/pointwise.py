"""Shard ops that work element by element, and their backward ops, along every dim."""

from __future__ import annotations

import torch

from autopar.rules.dims import sized
from autopar.rules.registry import rule
from autopar.torch_private import aten

rule(
    "... -> ...",
    "neg clone alias alias_copy detach positive deg2rad rad2deg _conj conj_physical _conj_physical",
    linear="0",
)
rule("... -> ...", "mul.Scalar div.Scalar _neg_view", linear="0")
rule("... -> ... c!", "view_as_real", linear="0")
rule("... c! -> ...", "view_as_complex", linear="0")
rule("... -> ...", """
    exp exp2 expm1 log log1p log2 log10 sqrt rsqrt reciprocal square abs sign sgn signbit floor ceil round
    round.decimals trunc frac sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc erfinv lgamma
    mvlgamma digamma polygamma sinc logit angle i0 special_i0e special_i1 special_i1e special_entr special_erfcx
    special_ndtri special_log_ndtr special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0
    special_bessel_y1 special_spherical_bessel_j0 special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 relu gelu silu sigmoid elu celu leaky_relu hardtanh hardsigmoid hardswish
    hardshrink softshrink softplus mish add.Scalar sub.Scalar rsub.Scalar pow.Tensor_Scalar pow.Scalar remainder.Scalar
    fmod.Scalar div.Scalar_mode copysign.Scalar clamp clamp_min clamp_max threshold nan_to_num isnan isinf isposinf
    isneginf logical_not bitwise_not bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar remainder.Scalar_Tensor
    bitwise_left_shift.Tensor_Scalar bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor
    bitwise_right_shift.Tensor_Scalar floor_divide.Scalar xlogy.Scalar_Other xlogy.Scalar_Self
    special_xlog1py.other_scalar special_xlog1py.self_scalar special_zeta.other_scalar special_zeta.self_scalar
    eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar
""")  # fmt: skip
rule("... -> ..., ...", "frexp.Tensor")

rule("..., ... -> ...", "add.Tensor sub.Tensor rsub.Tensor complex", linear="0+1")
rule("..., ... -> ...", "mul.Tensor", linear="0, 1")
rule("..., ... -> ...", "div.Tensor ldexp.Tensor polar", linear="0")
rule("..., ... -> ...", """
    pow.Tensor_Tensor maximum minimum fmax fmin atan2 hypot logaddexp logaddexp2 xlogy.Tensor remainder.Tensor
    fmod.Tensor div.Tensor_mode floor_divide clamp_min.Tensor clamp_max.Tensor _prelu_kernel logical_and logical_or
    logical_xor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor
    bitwise_right_shift.Tensor copysign.Tensor nextafter heaviside igamma igammac gcd lcm special_xlog1py special_zeta
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_hermite_polynomial_h
    special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
    eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor
""")  # fmt: skip
rule("..., ..., ... -> ...", "where.self", linear="1+2")
rule("..., ..., ... -> ...", "clamp.Tensor")
rule("..., ... -> ...", "lerp.Scalar", linear="0+1")
rule("..., ..., ... -> ...", "lerp.Tensor addcdiv", linear="0+1")
rule("..., ..., ... -> ...", "addcmul", linear="0+1, 0+2")
rule("..., ... -> ...", "masked_fill.Scalar")
rule("... -> ...", "fill.Scalar")
rule("..., () -> ...", "fill.Tensor", linear="1")
rule("..., ..., () -> ...", "masked_fill.Tensor")
rule("..., ... -> ...", "copy", linear="1")

# the gradient first, then the tensors that the forward saved: linear in the gradient
rule("..., ... -> ...", """
    threshold_backward gelu_backward silu_backward tanh_backward sigmoid_backward elu_backward leaky_relu_backward
    hardtanh_backward hardsigmoid_backward hardswish_backward hardshrink_backward softshrink_backward
    softplus_backward mish_backward logit_backward native_dropout_backward
""", linear="0")  # fmt: skip
rule("..., ..., ... -> ...", "rrelu_with_noise_backward", linear="0")
rule("..., ... -> ..., ...", "rrelu_with_noise_functional")  # in evaluation; in training its random twin is used
rule("..., ..., ... -> ..., ...", "_prelu_kernel_backward", linear="0")

# fused cells of recurrent nets: the gates of a hidden unit stay on one rank
GATES = "n (four! h)"
rule(
    sized(f"{GATES}, {GATES}, n h, (four! h), (four! h) -> n h, n h, {GATES}", lambda *_: {"four": 4}),
    "_thnn_fused_lstm_cell",
)
rule(
    sized(f"n h, n h, n h, n h, {GATES} -> {GATES}, n h, (four! h)", lambda *_: {"four": 4}),
    "_thnn_fused_lstm_cell_backward_impl",
    linear="0+1",
)


def _widens(x, *, dtype=None, **_) -> str:
    """A cast is linear if it rounds no value: a narrowing cast does not commute with the sum."""
    return "0" if dtype is None or torch.promote_types(x.dtype, dtype) == dtype else ""


CASTS = frozenset({aten._to_copy.default})

rule("... -> ...", "_to_copy", linear=_widens)
