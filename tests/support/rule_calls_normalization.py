"""Give calls of ops that normalize along dims: softmax, cumulative sums, layer and group norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from operands import Call, Calls, F, Operand, P, call

NORMS: list[tuple[tuple[int, ...], tuple[int, ...], bool, bool]] = [  # shape, normalized dims, weight, bias
    ((4, 6), (6,), True, True), ((4, 6), (6,), True, False), ((4, 6), (6,), False, False),
    ((3, 4, 6), (4, 6), True, True), ((3, 4, 6), (6,), True, True), ((2, 3, 1, 6), (1, 6), False, False),
    ((6,), (6,), True, True),
]  # fmt: skip


def layer_norm(shape: tuple[int, ...], over: tuple[int, ...], weight: bool, bias: bool) -> Call:
    return call(F(*shape), list(over), F(*over) if weight else None, F(*over) if bias else None, 1e-5)


def layer_norm_backward(shape: tuple[int, ...], over: tuple[int, ...], weight: bool, bias: bool, *mask: bool) -> Call:
    rows = (*shape[: len(shape) - len(over)], *[1] * len(over))
    given = mask or (True, weight, bias)
    return call(F(*shape), F(*shape), list(over), F(*rows), P(*rows), F(*over) if weight else None,
                F(*over) if bias else None, list(given))  # fmt: skip


GROUP_NORMS: list[tuple[tuple[int, ...], int, bool]] = [
    ((4, 6, 3), 2, True),
    ((3, 4, 3, 2), 4, True),
    ((5, 4, 3, 2), 1, False),
]


def group_norm(shape: tuple[int, ...], groups: int, affine: bool) -> Call:
    n, c, *places = shape
    scale = (F(c), F(c)) if affine else (None, None)
    return call(F(*shape), *scale, n, c, math.prod(places), groups, 1e-5)


def group_norm_backward(shape: tuple[int, ...], groups: int, affine: bool) -> Call:
    (x, weight, _, n, *how, _), _ = group_norm(shape, groups, affine)
    return call(x, x, F(n, groups), P(n, groups), weight, n, *how, [True, affine, affine])


def along(*before: Callable[..., Operand], after: tuple[Any, ...] = ()) -> list[Call]:
    """Ops along one dim, of tensors of one to four dims, on dims from both ends."""
    shapes = [
        ((4, 5), 1),
        ((4, 5), 0),
        ((5,), 0),
        ((3, 4, 5), -1),
        ((3, 4, 5), 1),
        ((2, 3, 4, 2), -2),
        ((1, 6), 1),
        ((3, 2), 0),
    ]
    return [call(*(draw(*shape) for draw in before), dim, *after) for shape, dim in shapes]


NORMALIZATION: Calls = [
    ("_softmax _log_softmax", along(F, after=(False,))),
    ("_safe_softmax", along(F)),
    ("cumsum cumprod logcumsumexp", along(F)),
    ("_softmax_backward_data _log_softmax_backward_data", along(F, P, after=(torch.float64,))),
    ("glu", [call(F(4, 6), 1), call(F(4, 6)), call(F(6), 0), call(F(3, 8, 5), 1), call(F(2, 3), 0)]),
    ("glu_backward", [call(F(4, 3), F(4, 6), 1), call(F(3, 4, 5), F(3, 8, 5), 1), call(F(3), F(6), -1)]),
    ("native_layer_norm", [layer_norm(*norm) for norm in NORMS]),
    ("native_layer_norm_backward", [layer_norm_backward(*norm) for norm in NORMS]),
    ("native_layer_norm_backward",
     [layer_norm_backward(*NORMS[0], *mask) for mask in ((False, True, True), (True, False, True), (True, False, False),
                                                         (False, False, True))]),
    ("native_group_norm", [group_norm(*row) for row in GROUP_NORMS]),
    ("native_group_norm_backward", [group_norm_backward(*row) for row in GROUP_NORMS]),
    # seldom ones, of which torch's samples have none, or too few
    ("_fused_rms_norm", [call(F(4, 6), [6], F(6), 1e-5), call(F(3, 4, 6), [4, 6], None, 1e-5),
                         call(F(6), [6], F(6), 1e-5)]),
    ("_weight_norm_interface",
     [call(F(4, 5), F(4, 1)), call(F(4, 3, 5), F(1, 1, 5), 2), call(F(6, 2, 3), F(6, 1, 1), 0)]),
    ("_weight_norm_interface_backward",
     [call(F(4, 5), F(4, 5), F(4, 1), P(4, 1), 0), call(F(4, 3, 5), F(4, 3, 5), F(1, 1, 5), P(1, 1, 5), 2)]),
    ("native_group_norm_backward",
     [call(*group_norm_backward(*GROUP_NORMS[0])[0][:-1], mask) for mask in ([False, True, True],
         [True, False, False])]),
]  # fmt: skip
