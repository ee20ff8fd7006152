"""Shard attention by heads and by batch. A query reads all keys, so those stay whole.

A query ``q`` is ``b h s d!``, ``k`` is ``b h t! d!``, ``v`` is ``b h t! e!``, ``o`` is ``b h s e!``, a ``row`` of sums
``b h s``.
"""

from __future__ import annotations

from autopar.ir.ops.seeded_random import FUSED_DROPOUT
from autopar.rules import forms as to
from autopar.rules.registry import rule

FLASH, EFFICIENT, CUDNN, OTHER = FUSED_DROPOUT


def kernel(
    op: str, sides: str, causal: int, mask: int | str | None = None, rows: bool = True, longest: int = 0
) -> None:
    """Define a kernel with these operands and results; ``causal``, ``mask`` and ``longest`` are positions of arguments.

    At ``longest`` is the number of queries. No kernel takes empty pieces; a backward is linear in its first operand.
    """
    query = int(op.endswith("_backward"))
    pattern, work = to.attention(sides, query, causal, mask, rows=rows), to.attention_work(query, causal)
    rule(pattern, op, linear="0" * query, sizes={longest: "s"} if longest else {}, empty=False, work=work)


kernel(f"{FLASH}_for_cpu", "q, k, v, mask -> o, row", 4, "attn_mask")
kernel(f"{FLASH}_for_cpu_backward", "o, q, k, v, o, row, mask -> q, k, v", 7, "attn_mask")

# kernels of accelerators, by their schema: after the rows come lengths of ragged batches, largest lengths, the state of
# a random generator, a mask for debugging. None of these is data: the kernel's backward reads them on the same rank
kernel(FLASH, "q, k, v -> o, row, own, own, own, own, own, own, own", 4)
kernel(f"{FLASH}_backward", "o, q, k, v, o, row, own, own, own, own -> q, k, v", 11, longest=8)
kernel(EFFICIENT, "q, k, v, mask -> o, row, own, own", 6, 3, rows=False)
kernel(f"{EFFICIENT}_backward", "o, q, k, v, mask, o, row, own, own -> q, k, v, mask", 11, 4, rows=False)
kernel(CUDNN, "q, k, v, mask -> o, column, own, own, own, own, own, own, own", 6, 3)
kernel(f"{CUDNN}_backward", "o, q, k, v, o, column, own, own, mask, own, own -> q, k, v", 14, 8, longest=11)
kernel(OTHER, "q, k, v, mask -> o, row, own, own, own, own, own, own, own", 5, 3)
kernel(f"{OTHER}_backward", "o, q, k, v, mask, o, row, own, own, own, own -> q, k, v, mask", 13, 4, longest=10)

# a causal attention with the positions of its queries can be split along them (``autopar.ir.ops.sharded_lookup``); its
# kernel computes all scores, and masks them
for query, op, sides in (
    (0, "causal_attention", "q, k, v, s -> o, row"),
    (1, "causal_attention_backward", "o, q, k, v, o, row, s -> q, k, v"),
):
    rule(to.attention(sides, query), f"autopar::{op}", linear="0" * query, empty=False, work=to.attention_work(query))
