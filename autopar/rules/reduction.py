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
rule(_reduce(), "count_nonzero count_nonzero.dim_IntList")
rule(_reduce("max"), "amax max", empty=False)
rule(_reduce("min"), "amin min", empty=False)
rule(_reduce("max"), "any any.dim")
rule(_reduce("min"), "all all.dim")
rule(_reduce("prod"), "prod prod.dim_int")


def _whole(x, dims=None, keepdim: bool = False, *, results: int = 1) -> str:
    """Reductions whose parts do not add up: what is reduced stays whole."""
    ndim = len(x.shape)
    gone = {d % ndim for d in ([dims] if isinstance(dims, int) else dims or range(ndim))} if ndim else set()
    old = [f"d{k}" + "!" * (k in gone) for k in range(ndim)]
    new = ["1" if k in gone else d for k, d in enumerate(old) if keepdim or k not in gone]
    return f"{' '.join(old) or '()'} -> {', '.join([' '.join(new) or '()'] * results)}"


rule(_whole, "argmax argmin logsumexp")
rule(lambda x, order=2, *rest, **_: _whole(x, *rest), "linalg_vector_norm")
rule(lambda x, *rest: _whole(x, *rest, results=2), "max.dim min.dim")


def _ordered(position: int):
    """One dim is looked at as a whole, and some or all of it comes back, with its indices."""

    def bound(x, *args, **_) -> str:
        dims = [f"d{k}" for k in range(len(x.shape))]
        new = list(dims)
        if dims:
            dim = args[position - 1] if len(args) >= position else -1
            dims[dim], new[dim] = "whole!", "kept!"
        one = " ".join(new) or "()"
        return f"{' '.join(dims) or '()'} -> {one}, {one}"

    return bound


rule(_ordered(1), "sort")
rule(_ordered(2), "topk")
