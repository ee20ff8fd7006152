"""Reductions over dims. A split dim that is summed leaves the result pending."""

from __future__ import annotations

from autopar.rules.registry import rule


def _reduce(by: str = "sum"):
    def bound(x, dims=None, keepdim: bool = False, **_) -> str:
        ndim = len(x.shape)
        gone = {d % ndim for d in ([dims] if isinstance(dims, int) else dims or range(ndim))} if ndim else set()
        old = [f"d{k}" for k in range(ndim)]
        new = ["1" if k in gone else d for k, d in enumerate(old) if keepdim or k not in gone]
        return f"{' '.join(old) or '()'} -> {' '.join(new) or '()'}" + ("" if by == "sum" else f" by {by}")

    return bound


rule(_reduce(), "sum sum.dim_IntList", linear="0")
rule(_reduce("max"), "amax")
rule(_reduce("min"), "amin")
