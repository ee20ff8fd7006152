"""Attention. Heads and batch come apart; a query looks at all keys, so those stay whole."""

from __future__ import annotations

from autopar.rules.registry import rule


def _factors(query, key, causal: bool, mask) -> tuple[str, str, str, str, str]:
    """Of the query, the key, the value, the mask, and the log-sum-exp of each query's row.

    Under a causal mask a query's place matters, so the sequence stays whole. Several heads may share a key: ``(h r)``.
    """
    s = "s!" if causal else "s"
    h, g = ("h", "h") if query.shape[1] == key.shape[1] else ("(h r)", "h")
    full = ["b", h, s, "t!"]
    size = [*query.shape[:3], key.shape[2]]
    seen = () if mask is None else mask.shape
    lead = 4 - len(seen)
    masked = " ".join("1" if n == 1 != size[lead + k] else full[lead + k] for k, n in enumerate(seen)) or "()"
    return f"b {h} {s} d!", f"b {g} t! d!", f"b {g} t! e!", masked, f"b {h} {s}"


def _attention(query, key, value, dropout=0.0, causal=False, *, attn_mask=None, **_) -> str:
    q, k, v, mask, row = _factors(query, key, causal, attn_mask)
    return f"{q}, {k}, {v}, {mask} -> {q.replace('d!', 'e!')}, {row}"


def _attention_backward(gradient, query, key, value, out, logsumexp, dropout, causal, *, attn_mask=None, **_) -> str:
    q, k, v, mask, row = _factors(query, key, causal, attn_mask)
    o = q.replace("d!", "e!")
    return f"{o}, {q}, {k}, {v}, {o}, {row}, {mask} -> {q}, {k}, {v}"


rule(_attention, "_scaled_dot_product_flash_attention_for_cpu", empty=False)
rule(_attention_backward, "_scaled_dot_product_flash_attention_for_cpu_backward", linear="0", empty=False)
