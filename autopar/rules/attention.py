"""Attention. Heads and batch come apart; a query looks at all keys, so those stay whole."""

from __future__ import annotations

from autopar.rules.dims import broadcast
from autopar.rules.registry import rule


def _factors(query, key, causal: bool, mask, rows: bool = True) -> dict[str, str]:
    """Of the query, the key, the value, the output, the mask, and the log-sum-exp of each query's row.

    Under a causal mask a query's place matters, so the sequence stays whole; also where rows are padded. Several heads
    may share a key: ``(h r)``.
    """
    s = "s!" if causal or not rows else "s"
    h, g = ("h", "h") if query.shape[1] == key.shape[1] else ("(h r)", "h")
    seen = "()" if mask is None else broadcast(mask.shape, ["b", h, s, "t!"], [*query.shape[:3], key.shape[2]])
    row = f"b {h} {s if rows else 'rows!'}"
    return {"q": f"b {h} {s} d!", "k": f"b {g} t! d!", "v": f"b {g} t! e!", "o": f"b {h} {s} e!", "mask": seen, "row": row, "column": f"{row} 1"}


def _text(sides: str, factors: dict[str, str]) -> str:
    """``q, k, v -> o, row`` with the factors of each; what is none of them stands as it is: ``()``, ``none!``."""
    sides, by, kind = sides.partition(" by ")
    return " -> ".join(", ".join(factors.get(one, one) for one in side.split(", ")) for side in sides.split(" -> ")) + by + kind


def _attention(sides: str, query: int, causal: int, mask: int | str | None = None, **options):
    """The pattern of a kernel that takes its operands, and gives its results, in this order."""

    def pattern(*args, **kwargs) -> str:
        masked = kwargs.get(mask) if isinstance(mask, str) else args[mask] if mask is not None and len(args) > mask else None
        return _text(sides, _factors(args[query], args[query + 1], len(args) > causal and args[causal], masked, **options))

    pattern.__doc__ = f"``{sides}``, where ``q`` is ``b h s d!``, ``k`` ``b h t! d!``, ``v`` ``b h t! e!``, ``o`` ``b h s e!``."
    return pattern


FLASH = "_scaled_dot_product_flash_attention"
rule(_attention("q, k, v, mask -> o, row", 0, 4, "attn_mask"), f"{FLASH}_for_cpu", empty=False)
rule(_attention("o, q, k, v, o, row, mask -> q, k, v", 1, 7, "attn_mask"), f"{FLASH}_for_cpu_backward", linear="0", empty=False)

# kernels of accelerators, by their schema: after the rows come lengths of ragged batches, largest lengths, the state of a
# random generator, a mask. What all ranks have alike, as that state, is the maximum of theirs
rule(_attention("q, k, v -> o, row, (), (), (), (), seed!, (), none! by max", 0, 4), FLASH, empty=False)
rule(_attention("o, q, k, v, o, row, (), (), seed!, () -> q, k, v", 1, 11), f"{FLASH}_backward", linear="0", empty=False)

EFFICIENT = "_scaled_dot_product_efficient_attention"
rule(_attention("q, k, v, mask -> o, row, (), () by max", 0, 6, 3, rows=False), EFFICIENT, empty=False)
rule(_attention("o, q, k, v, mask, o, row, (), () -> q, k, v, mask", 1, 11, 4, rows=False), f"{EFFICIENT}_backward", linear="0", empty=False)

CUDNN = "_scaled_dot_product_cudnn_attention"
rule(_attention("q, k, v, mask -> o, column, (), (), (), (), (), (), none! by max", 0, 6, 3), CUDNN, empty=False)
rule(_attention("o, q, k, v, o, column, (), (), mask, (), () -> q, k, v", 1, 14, 8), f"{CUDNN}_backward", linear="0", empty=False)

OTHER = "_scaled_dot_product_fused_attention_overrideable"
rule(_attention("q, k, v, mask -> o, row, (), (), (), (), (), (), none! by max", 0, 5, 3), OTHER, empty=False)
rule(_attention("o, q, k, v, mask, o, row, (), (), (), () -> q, k, v, mask", 1, 13, 4), f"{OTHER}_backward", linear="0", empty=False)

# told the places of its queries, a causal attention comes apart along them (``autopar.held``)
rule(lambda q, k, *_: _text("q, k, v, s -> o, row", _factors(q, k, False, None)), "autopar::causal_attention", empty=False)
rule(lambda o, q, k, *_: _text("o, q, k, v, o, row, s -> q, k, v", _factors(q, k, False, None)),
     "autopar::causal_attention_backward", linear="0", empty=False)  # fmt: skip
