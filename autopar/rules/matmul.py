"""Matrix products. The bias of ``addmm`` is added to the sum over k: where k is split, it must be pending too."""

from __future__ import annotations

from autopar.rules.registry import rule

rule("m k, k n -> m n", "mm", linear="0, 1")
rule("b m k, b k n -> b m n", "bmm", linear="0, 1")
rule("m k, k -> m", "mv", linear="0, 1")
rule("k, k -> ()", "dot", linear="0, 1")


def _bias(pattern: str):
    """The bias broadcasts: its leading dims may be missing or of size one."""
    left, result = pattern.split(" -> ")
    dims = result.split()

    def bound(bias, *_, **__) -> str:
        size = len(bias.shape)
        own = " ".join("1" if n == 1 else d for n, d in zip(bias.shape, dims[len(dims) - size :], strict=True)) or "()"
        return f"{own}, {left} -> {result}"

    return bound


rule(_bias("m k, k n -> m n"), "addmm", linear="0+1, 0+2")
rule(_bias("b m k, b k n -> b m n"), "baddbmm", linear="0+1, 0+2")


def _addmv(bias, matrix, *_, **__) -> str:
    """A bias that broadcasts makes a result of its own size where torch is given an empty piece."""
    own, m = ("m", "m") if bias.shape == matrix.shape[:1] else ("1" if bias.shape else "()", "m!")
    return f"{own}, {m} k, k -> {m}"


rule(_addmv, "addmv", linear="0+1, 0+2")


def _trilinear(a, b, c, expand_a, expand_b, expand_c, summed, *_) -> str:
    """A product of three, each without the dims it is expanded by, summed over some."""
    dims = [f"d{k}" for k in range(len(a.shape) + len(expand_a))]
    sides = [" ".join(d for k, d in enumerate(dims) if k not in gone) for gone in (expand_a, expand_b, expand_c, summed)]
    return f"{', '.join(sides[:3])} -> {sides[3] or '()'}"


rule(_trilinear, "_trilinear", linear="0, 1, 2")
