"""Give calls of ops that reduce dims: sums, extremes, norms, and sorting along one."""

from __future__ import annotations

import torch
from operands import B, Calls, F, I, W, call

REDUCED = [
    ((4, 5), 1),
    ((4, 5), 0),
    ((5,), 0),
    ((3, 4, 5), -1),
    ((3, 4, 5), 1),
    ((2, 3, 4, 5), 2),
    ((1, 6), 0),
    ((3, 2), 1),
]
BY_DIM = [call(F(*shape), dim, keep) for shape, dim in REDUCED for keep in (False, True)]
BY_DIMS = [call(F(*shape), [dim], keep) for shape, dim in REDUCED for keep in (False, True)] + [
    call(F(3, 4, 5), [0, 2]), call(F(3, 4, 5), [0, -1], True), call(F(4, 5), [0, 1]),
    call(F(2, 3, 4, 5), [1, 2, 3], True),
]  # fmt: skip
WHOLE = [call(F(*shape)) for shape in ((4, 5), (6,), (3, 4, 5), ())]
TRUTHS = [call(B(*shape), dim, keep) for shape, dim in REDUCED for keep in (False, True)]

REDUCTION: Calls = [
    ("sum amax amin max min prod count_nonzero", WHOLE),
    ("argmax argmin", WHOLE),
    ("sum.dim_IntList amax amin", BY_DIMS),
    ("sum.dim_IntList", [call(F(4, 5), None), call(F(4, 5), []), call(I(4, 5), [0]), call(F(), [])]),
    ("sum", [call(I(4, 5)), call(W(4, 5), dtype=torch.float64)]),
    ("count_nonzero.dim_IntList", [call(I(4, 5, below=2), [1]), call(I(3, 4, 5, below=2), [0, 2]), call(B(6), [0])]),
    ("count_nonzero", [call(I(4, 5, below=2))]),
    ("prod.dim_int argmax argmin max.dim min.dim", BY_DIM),
    ("logsumexp", BY_DIMS),
    ("linalg_vector_norm", [call(x, 3.0, *rest) for (x, *rest), _ in BY_DIMS]),
    ("linalg_vector_norm", [call(F(4, 5)), call(F(3, 4, 5), float("inf"), None), call(F(4, 5), 2, None, True)]),
    ("any.dim all.dim", TRUTHS),
    ("any all", [call(B(4, 5)), call(B(6)), call(B(3, 4, 5))]),
    ("sort", [call(F(4, 5)), call(F(4, 5), 0), call(F(3, 4, 5), 1, True), call(F(5))]),
    ("topk", [call(F(4, 5), 2), call(F(4, 5), 2, 0), call(F(3, 4, 5), 3, 1, False), call(F(5), 5)]),
    # seldom ones, of which torch's samples have none, or too few
    ("histc", [call(F(4, 5), 4, -2.0, 2.0), call(F(4, 5), 4), call(F(6), 3, 0, 1)]),
]  # fmt: skip
