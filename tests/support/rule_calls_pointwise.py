"""Give calls of ops that go element by element, and of their backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from operands import SHAPES, B, Call, Calls, F, I, Operand, P, W, call, unary

PAIRS = [
    ((4, 5), (4, 5)), ((4, 5), (5,)), ((5,), (4, 5)), ((4, 1), (1, 5)), ((2, 3, 4), (3, 1)), ((4, 5), ()), ((), ()),
    ((2, 1, 3, 5), (4, 1, 5)), ((4, 1), (4, 1)), ((3, 2), (3, 2)), ((3, 2), (2,)), ((2, 1), (1, 3)),
]  # fmt: skip


def binary(draw: Callable[..., Operand], *rest: Any, **options: Any) -> list[Call]:
    return [call(draw(*a), draw(*b), *rest, **options) for a, b in PAIRS]


def saved(*rest: Any, **options: Any) -> list[Call]:
    """A gradient and what the forward kept, of one shape."""
    return [call(F(*shape), P(*shape), *rest, **options) for shape in SHAPES]


POINTWISE: Calls = [
    # element by element
    ("neg clone alias detach", unary(F)),
    ("neg clone", [call(W(4, 5, dtype=torch.int64))]),
    ("mul.Scalar div.Scalar", unary(F, 3.0)),
    ("exp exp2 expm1 reciprocal square abs sign sgn floor ceil round trunc frac", unary(F)),
    ("sin cos tan atan sinh cosh tanh asinh acosh erf erfc lgamma digamma sinc nan_to_num isnan isinf", unary(F)),
    ("log log1p log2 log10 sqrt rsqrt asin acos atanh erfinv logit", unary(P)),
    ("polygamma", [call(1, P(4, 5)), call(2, P(6))]),
    ("relu gelu silu sigmoid elu celu leaky_relu hardtanh hardsigmoid hardswish hardshrink softshrink softplus "
     "mish", unary(F)),
    ("gelu", [call(F(4, 5), approximate="tanh")]),
    ("elu", [call(F(4, 5), 1.5, 1.1, 0.9)]),
    ("softplus", [call(F(4, 5), 2.0, 1.0)]),
    ("add.Scalar sub.Scalar rsub.Scalar pow.Tensor_Scalar remainder.Scalar fmod.Scalar clamp clamp_min "
     "clamp_max", unary(F, 3)),
    ("pow.Scalar", [call(2, F(4, 5)), call(0.5, F(2, 3, 4))]),
    ("clamp", [call(F(4, 5), -1.0, 1.0), call(F(4, 5), None, 0.5)]),
    ("threshold", unary(F, 0.1, 0.2)),
    ("eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar", unary(I, 4)),
    ("logical_not", [*unary(B), call(F(4, 5))]),
    ("bitwise_not", [*unary(B), *unary(I)]),
    ("add.Tensor sub.Tensor", [*binary(F), call(F(4, 5), F(5), alpha=0.5), call(I(4, 5), I(5))]),
    ("mul.Tensor", [*binary(F), call(F(4, 5), B(5)), call(I(4), I(4))]),
    ("div.Tensor", binary(P)),
    ("maximum minimum atan2 hypot logaddexp remainder.Tensor fmod.Tensor floor_divide", binary(F)),
    ("pow.Tensor_Tensor xlogy.Tensor", binary(P)),
    ("div.Tensor_mode", [*binary(F, rounding_mode="floor"), call(F(4, 5), F(5), rounding_mode="trunc")]),
    ("clamp_min.Tensor clamp_max.Tensor", binary(F)),
    ("logical_and logical_or logical_xor", [*binary(B), *binary(I)]),
    ("bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor", [*binary(B), *binary(I)]),
    ("eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor", binary(lambda *s: I(*s, below=3))),
    ("_prelu_kernel", [call(F(4, 5), F(1, 5)), call(F(4, 5), F(1, 1)), call(F(2, 3, 4), F(1, 3, 1))]),
    ("where.self", [call(B(4, 5), F(4, 5), F(4, 5)), call(B(4, 1), F(5), F(4, 5)), call(B(5), F(3, 4, 5), F()),
                    call(B(), F(4), F(4))]),
    ("clamp.Tensor", [call(F(4, 5), F(4, 5), F(5)), call(F(4, 5), None, F(4, 5)), call(F(4, 5), F(5), None)]),
    ("lerp.Scalar", binary(F, 0.3)),
    ("lerp.Tensor", [call(F(4, 5), F(4, 5), P(5)), call(F(4, 1), F(5), P(4, 5)), call(F(3), F(3), P(3))]),
    ("addcmul", [call(F(4, 5), F(4, 5), F(5), value=0.5), call(F(4, 1), F(5), F(4, 5)), call(F(3), F(3), F())]),
    ("addcdiv", [call(F(4, 5), F(4, 5), P(5), value=0.5), call(F(4, 1), F(5), P(4, 5)), call(F(3), F(3), P())]),
    ("masked_fill.Scalar", [call(F(4, 5), B(4, 5), 2.0), call(F(3, 4, 5), B(4, 1), 1.5), call(F(4), B(), 0.0)]),
    ("masked_fill.Tensor", [call(F(4, 5), B(4, 5), F()), call(F(3, 4, 5), B(4, 1), F())]),
    ("fill.Scalar", unary(F, 2.0)),
    ("fill.Tensor", [call(F(4, 5), F()), call(F(3), F())]),
    ("copy", [call(F(4, 5), F(4, 5)), call(F(4, 5), F(5)), call(F(3, 4), F(3, 1)), call(F(3), F())]),
    ("_to_copy", [call(F(4, 5)), call(F(4, 5), dtype=torch.float32), call(F(4, 5), dtype=torch.bfloat16)]),
    ("_to_copy", [call(W(4, 5), dtype=torch.float64), call(W(4, 5), dtype=torch.int32),
                  call(I(4, 5), dtype=torch.float64)]),
    ("_to_copy", [call(W(3, dtype=torch.bfloat16), dtype=torch.float32), call(B(4, 5), dtype=torch.float64),
                  call(F())]),
    # their backwards
    ("silu_backward tanh_backward sigmoid_backward hardsigmoid_backward hardswish_backward mish_backward "
     "logit_backward", saved()),
    ("gelu_backward", [*saved(), call(F(4, 5), F(4, 5), approximate="tanh")]),
    ("threshold_backward hardshrink_backward softshrink_backward", saved(0.5)),
    ("elu_backward", [call(F(*s), 1.5, 1.1, 0.9, kept, F(*s)) for s in SHAPES for kept in (False, True)]),
    ("leaky_relu_backward", saved(0.1, False)),
    ("rrelu_with_noise_functional", [call(F(*s), P(*s)) for s in SHAPES]),
    ("hardtanh_backward", saved(0.3, 0.6)),
    ("softplus_backward", saved(2.0, 1.0)),
    ("_prelu_kernel_backward", [call(F(4, 5), F(4, 5), F(1, 5)), call(F(2, 3, 4), F(2, 3, 4), F(1, 3, 1))]),
    # seldom ones, of which torch's samples have none, or too few
    ("positive conj_physical square _neg_view", unary(F)),
    ("fmod.Scalar clamp_max xlogy.Scalar_Other special_xlog1py.other_scalar", unary(F, 3.0)),
    ("xlogy.Scalar_Self special_xlog1py.self_scalar special_zeta.self_scalar", [call(2.0, P(4, 5)), call(3.0, P(6))]),
    ("special_zeta.other_scalar", [call(P(4, 5), 2.0)]),
    ("remainder.Scalar_Tensor", [call(7, F(4, 5))]),
    ("div.Scalar_mode", [call(F(4, 5), 0.7, rounding_mode="floor"), call(F(4, 5), 0.7, rounding_mode="trunc")]),
    ("floor_divide.Scalar", unary(F, 0.7)),
    ("bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar", unary(I, 5)),
    ("bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar", unary(I, 2)),
    ("bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor", [call(5, I(4, 5))]),
]  # fmt: skip
