"""Give calls of ops that multiply matrices: products, distances, attention."""

from __future__ import annotations

import torch
from operands import Call, Calls, F, K, W, call

ATTENTION: list[tuple[bool, tuple[int, ...] | None, int]] = [  # causal, the mask's shape, heads of keys
    (False, None, 4), (True, None, 4), (False, (5, 4), 4), (False, (3, 1, 5, 4), 4), (False, (1, 4, 1, 4), 4),
    (True, None, 2), (False, None, 1), (False, (1, 4, 1, 4), 2),
]  # fmt: skip


def attention(causal: bool, mask: tuple[int, ...] | None, heads: int) -> Call:
    keys = 5 if causal else 4
    return call(F(3, 4, 5, 6), F(3, heads, keys, 6), F(3, heads, keys, 6), 0.0, causal, attn_mask=mask and F(*mask))


def attention_backward(causal: bool, mask: tuple[int, ...] | None, heads: int) -> Call:
    (q, k, v, *rest), options = attention(causal, mask, heads)
    return call(q, q, k, v, q, F(*q.shape[:3]), *rest, **options)


MATMUL: Calls = [
    # matrix products
    ("mm", [call(F(4, 5), F(5, 6)), call(F(1, 5), F(5, 3)), call(F(4, 1), F(1, 3)), call(F(7, 2), F(2, 1))]),
    ("bmm", [call(F(3, 4, 5), F(3, 5, 2)), call(F(1, 4, 6), F(1, 6, 1))]),
    ("mv", [call(F(4, 5), F(5)), call(F(1, 4), F(4))]),
    ("dot", [call(F(5), F(5)), call(F(1), F(1))]),
    ("addmm", [call(F(6), F(4, 5), F(5, 6)), call(F(4, 6), F(4, 5), F(5, 6)), call(F(1, 6), F(4, 5), F(5, 6))]),
    ("addmm", [call(F(4, 1), F(4, 5), F(5, 6), beta=0.5, alpha=2.0), call(F(), F(4, 5), F(5, 6)),
               call(F(1), F(4, 5), F(5, 6))]),
    ("baddbmm", [call(F(3, 4, 2), F(3, 4, 5), F(3, 5, 2)),
                 call(F(1, 1, 2), F(3, 4, 5), F(3, 5, 2), beta=2.0, alpha=0.5)]),
    ("addmv", [call(F(4), F(4, 5), F(5)), call(F(1), F(4, 5), F(5)), call(F(), F(4, 5), F(5))]),
    ("_trilinear", [call(F(4, 5), F(3, 5, 6), F(4, 6), [1, 3], [0], [1, 2], [2, 3])]),
    ("_trilinear", [call(F(4, 5), F(4, 5), F(4, 5), [], [], [], [1]),
                    call(F(4, 5), F(4, 3), F(5), [2], [1], [0, 2], [1, 2])]),
    # attention
    ("_scaled_dot_product_flash_attention_for_cpu", [attention(*row) for row in ATTENTION]),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", [attention_backward(*row) for row in ATTENTION]),
    # seldom ones, of which torch's samples have none, or too few
    ("_cdist_forward", [call(F(4, 5), F(3, 5), p, None) for p in (1.0, 2.0, 3.0)] + [call(F(2, 4, 5), F(2, 3, 5), 2.0,
        None)]),
    ("_grouped_mm", [call(W(3, 4, 24), W(3, 24, 48)), call(W(4, 24), W(2, 24, 48), K([1, 4], torch.int32))]),
    ("_grouped_mm", [call(W(2, 4, 24), W(24, 8), K([4, 8], torch.int32)),
                     call(W(24, 8), W(8, 24), K([2, 8], torch.int32))]),
]  # fmt: skip
