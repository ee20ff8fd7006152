"""Shard matrix products.

The bias of ``addmm`` is added to the sum over k: if k is split, the bias must be pending too.
"""

from __future__ import annotations

from autopar.rules import forms as to
from autopar.rules.registry import rule

rule("m k, k n -> m n", "mm", linear="0, 1", work="2 m k n")
rule("b m k, b k n -> b m n", "bmm", linear="0, 1", work="2 b m k n")
rule("m k, k -> m", "mv", linear="0, 1", work="2 m k")
rule("k, k -> ()", "dot vdot", linear="0, 1", work="2 k")

rule(to.bias("m k, k n -> m n"), "addmm", linear="0+1, 0+2", work="2 m k n")
rule(to.bias("b m k, b k n -> b m n"), "baddbmm", linear="0+1, 0+2", work="2 b m k n")
rule(to.bias("b m k, b k n -> m n"), "addbmm", linear="0+1, 0+2", work="2 b m k n")
rule(to.bias("m, n -> m n"), "addr", linear="0+1, 0+2", work="m n")

rule(to.addmv, "addmv", linear="0+1, 0+2", work="2 m k")
rule(to.trilinear, "_trilinear", linear="0, 1, 2", work=to.trilinear_work)
rule(to.grouped, "_grouped_mm", work=to.grouped_work,
     linear=lambda a, b, ends=None, bias=None, *_, **__: "0, 1" if bias is None else "")  # fmt: skip

# distances between the rows of two matrices; in backward the distance is known, and columns can be split
# a difference, a power and a sum for each element; the euclidean one is a product
rule("... m k!, ... n k! -> ... m n", "_cdist_forward", work="3 ... m n k")
rule("... m k!, ... n k! -> ... m n", "_euclidean_dist", work="2 ... m n k")
rule("... m n, ... m k, ... n k, ... m n -> ... m k", "_cdist_backward", linear="0", work="3 ... m n k")
rule("m! k! -> pairs!", "_pdist_forward", work="3 pairs k")
rule("pairs!, m! k, pairs! -> m! k", "_pdist_backward", linear="0", work="3 pairs k")
