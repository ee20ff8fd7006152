"""Give calls of ops that make tensors of constants."""

from __future__ import annotations

import torch
from operands import Calls, F, I, call, unary

FACTORIES: Calls = [
    ("full", [call([4, 5], 2.0), call([], 3), call([6], 1, dtype=torch.int64)]),
    ("zeros ones", [call([4, 5]), call([]), call([2, 3, 4], dtype=torch.float64)]),
    ("zeros_like ones_like", [*unary(F), call(I(4, 5), dtype=torch.float64)]),
    ("full_like", unary(F, 2.0)),
    ("scalar_tensor", [call(2.0), call(3, dtype=torch.int64)]),
    ("arange", [call(5)]),
    ("arange.start", [call(2, 7)]),
    ("arange.start_step", [call(0, 9, 2)]),
    ("linspace", [call(0, 1, 5)]),
    ("logspace", [call(0, 1, 5)]),
    ("linspace.Tensor_Tensor logspace.Tensor_Tensor", [call(F(), F(), 5)]),
    ("linspace.Tensor_Scalar logspace.Tensor_Scalar", [call(F(), 1, 5)]),
    ("linspace.Scalar_Tensor logspace.Scalar_Tensor", [call(1, F(), 5)]),
    ("eye", [call(4)]),
    ("eye.m", [call(4, 3)]),
    ("tril_indices triu_indices", [call(4, 3)]),
]  # fmt: skip
