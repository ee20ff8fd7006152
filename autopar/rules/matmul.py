"""Matrix products. The bias of ``addmm`` is added to the sum over k: where k is split, it must be pending too."""

from __future__ import annotations

from autopar.rules.dims import broadcast, tensor
from autopar.rules.registry import rule

rule("m k, k n -> m n", "mm", linear="0, 1")
rule("b m k, b k n -> b m n", "bmm", linear="0, 1")
rule("m k, k -> m", "mv", linear="0, 1")
rule("k, k -> ()", "dot vdot", linear="0, 1")


def _bias(pattern: str):
    """The bias broadcasts: its leading dims may be missing or of size one."""
    left, result = pattern.split(" -> ")

    def bound(bias, *_, **__) -> str:
        return f"{broadcast(bias.shape, result.split())}, {left} -> {result}"

    bound.__doc__ = f"``bias, {pattern}``, where the bias broadcasts."
    return bound


rule(_bias("m k, k n -> m n"), "addmm", linear="0+1, 0+2")
rule(_bias("b m k, b k n -> b m n"), "baddbmm", linear="0+1, 0+2")
rule(_bias("b m k, b k n -> m n"), "addbmm", linear="0+1, 0+2")
rule(_bias("m, n -> m n"), "addr", linear="0+1, 0+2")


def _addmv(bias, matrix, *_, **__) -> str:
    """A bias that broadcasts makes a result of its own size where torch is given an empty piece."""
    own, m = ("m", "m") if bias.shape == matrix.shape[:1] else ("1" if bias.shape else "()", "m!")
    return f"{own}, {m} k, k -> {m}"


rule(_addmv, "addmv", linear="0+1, 0+2")


def _trilinear(a, b, c, expand_a, expand_b, expand_c, summed, *_) -> str:
    """A product of three, each without the dims it is expanded by, summed over some."""
    dims = [f"d{k}" for k in range(len(a.shape) + len(expand_a))]
    sides = [tensor(d for k, d in enumerate(dims) if k not in gone) for gone in (expand_a, expand_b, expand_c, summed)]
    return f"{', '.join(sides[:3])} -> {sides[3]}"


rule(_trilinear, "_trilinear", linear="0, 1, 2")


def _grouped(a, b, ends=None, bias=None, *_, **__) -> str:
    """Products of experts ``e``. Tokens lie behind each other, up to each expert's end, so they stay whole, as experts do."""
    where = ", e!" if ends is not None else ", ()"
    left, right, result = {
        (2, 3): ("t! k", "e! k n", "t! n"), (3, 2): ("e! m k", "k t!", "m t!"), (2, 2): ("m t!", "t! n", "e! m n"), (3, 3): ("e m k", "e k n", "e m n"),
    }[len(a.shape), len(b.shape)]  # fmt: skip
    return f"{left}, {right}{where}, {'()' if bias is None else 'e! n'} -> {result}"


rule(_grouped, "_grouped_mm", linear=lambda a, b, ends=None, bias=None, *_, **__: "0, 1" if bias is None else "")

# distances between the rows of two matrices; backward, the distance is known, and columns come apart
rule("... m k!, ... n k! -> ... m n", "_cdist_forward _euclidean_dist")
rule("... m n, ... m k, ... n k, ... m n -> ... m k", "_cdist_backward", linear="0")
rule("m! k! -> pairs!", "_pdist_forward")
rule("pairs!, m! k, pairs! -> m! k", "_pdist_backward", linear="0")
