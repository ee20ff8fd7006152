"""Shard ops that write or find elements by position, by a mask or by order. The searched dims stay whole."""

from __future__ import annotations

from autopar.rules import forms as to
from autopar.rules.dims import along, entire, ndim, wholes
from autopar.rules.registry import rule

# positions along one dim are written; later elements overwrite earlier ones
rule(along("whole, i! -> whole", 1), "index_fill.int_Scalar")
rule(along("whole, i!, () -> whole", 1), "index_fill.int_Tensor", linear="0+2")
rule(along("whole, i!, part -> whole", 1), "index_copy", linear="0+2")
rule(along("whole, i!, part -> whole", 1), "index_reduce")
rule(
    to.scatter_reduce,
    "scatter_reduce.two",
    linear=lambda x, dim, index, source, reduce, include_self=True: "0+2" * (reduce == "sum" and include_self),
)
rule(to.taken, "take", linear="0")
rule(entire(lambda x, *_: wholes(ndim(x), "a") or "()"), "put", linear="0+2")

# the position of each value depends on the whole mask
rule(entire(lambda x, mask, *_: wholes(max(ndim(x), ndim(mask))) or "()"), "masked_scatter", linear="0+2")
rule(entire(lambda gradient, mask, sizes: wholes(len(sizes)) or "()"), "masked_scatter_backward", linear="0")

# the position of a value in a sorted row is the number of smaller elements: counts add up, unless a sorter is given
rule("..., bounds -> ...", "bucketize.Tensor")
rule("bounds -> ()", "bucketize.Scalar")
rule(to.searched, "searchsorted.Tensor searchsorted.Scalar")
rule(to.is_in, "isin.Tensor_Tensor")
rule("... -> ...", "isin.Tensor_Scalar")

rule(to.bags, "_embedding_bag _embedding_bag_forward_only", empty=False)
rule(to.bags_backward, "_embedding_bag_backward", linear="0", empty=False)
rule("bags! d, v! d, i!, b!, o! -> i!", "_embedding_bag_per_sample_weights_backward", linear="0", empty=False)
