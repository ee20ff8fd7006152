"""Shard attention by heads and by batch. A query reads all keys, so those stay whole.

A query ``q`` is ``b h s d!``, ``k`` is ``b h t! d!``, ``v`` is ``b h t! e!``, ``o`` is ``b h s e!``, a ``row`` of sums
``b h s``.
"""

from __future__ import annotations

import functools

from autopar.rules import forms as to
from autopar.rules.registry import rule

# no kernel takes empty pieces; a backward is linear in the gradient, its first operand
backward = functools.partial(rule, linear="0", empty=False)

FLASH = "_scaled_dot_product_flash_attention"
rule(to.attention("q, k, v, mask -> o, row", 0, 4, "attn_mask"), f"{FLASH}_for_cpu", empty=False)
backward(to.attention("o, q, k, v, o, row, mask -> q, k, v", 1, 7, "attn_mask"), f"{FLASH}_for_cpu_backward")

# kernels of accelerators, by their schema: after the rows come lengths of ragged batches, largest lengths, the state of
# a random generator, a mask. A result that is equal on all ranks, such as that state, is written as their maximum
rule(to.attention("q, k, v -> o, row, (), (), (), (), seed!, (), none! by max", 0, 4), FLASH, empty=False)
backward(to.attention("o, q, k, v, o, row, (), (), seed!, () -> q, k, v", 1, 11), f"{FLASH}_backward")

EFFICIENT = "_scaled_dot_product_efficient_attention"
rule(to.attention("q, k, v, mask -> o, row, (), () by max", 0, 6, 3, rows=False), EFFICIENT, empty=False)
backward(
    to.attention("o, q, k, v, mask, o, row, (), () -> q, k, v, mask", 1, 11, 4, rows=False), f"{EFFICIENT}_backward"
)

CUDNN = "_scaled_dot_product_cudnn_attention"
rule(to.attention("q, k, v, mask -> o, column, (), (), (), (), (), (), none! by max", 0, 6, 3), CUDNN, empty=False)
backward(to.attention("o, q, k, v, o, column, (), (), mask, (), () -> q, k, v", 1, 14, 8), f"{CUDNN}_backward")

OTHER = "_scaled_dot_product_fused_attention_overrideable"
rule(to.attention("q, k, v, mask -> o, row, (), (), (), (), (), (), none! by max", 0, 5, 3), OTHER, empty=False)
backward(to.attention("o, q, k, v, mask, o, row, (), (), (), () -> q, k, v, mask", 1, 13, 4), f"{OTHER}_backward")

# a causal attention with the positions of its queries can be split along them (``autopar.ir.ops.sharded_lookup``)
rule(
    lambda q, k, *_: to.text("q, k, v, s -> o, row", to.factors(q, k, False, None)),
    "autopar::causal_attention",
    empty=False,
)
backward(
    lambda o, q, k, *_: to.text("o, q, k, v, o, row, s -> q, k, v", to.factors(q, k, False, None)),
    "autopar::causal_attention_backward",
)
