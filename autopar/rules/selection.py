"""Elements written or found by their place, by a mask or by order. What is looked into stays whole."""

from __future__ import annotations

from autopar.rules import forms as to
from autopar.rules.dims import along, entire, ndim, wholes
from autopar.rules.registry import rule

# places along one dim are written; later elements overwrite earlier ones
rule(along("whole, i! -> whole", 1), "index_fill.int_Scalar")
rule(along("whole, i!, () -> whole", 1), "index_fill.int_Tensor", linear="0+2")
rule(along("whole, i!, part -> whole", 1), "index_copy", linear="0+2")
rule(along("whole, i!, part -> whole", 1), "index_reduce")
rule(to.scatter_reduce, "scatter_reduce.two", linear=lambda x, dim, index, source, reduce, include_self=True: "0+2" * (reduce == "sum" and include_self))
rule(to.taken, "take", linear="0")
rule(entire(lambda x, *_: wholes(ndim(x), "a") or "()"), "put", linear="0+2")

# which value goes where depends on all of the mask
rule(entire(lambda x, mask, *_: wholes(max(ndim(x), ndim(mask))) or "()"), "masked_scatter", linear="0+2")
rule(entire(lambda gradient, mask, sizes: wholes(len(sizes)) or "()"), "masked_scatter_backward", linear="0")

# the place of each value in a sorted row is the number of those before it: counts add up, unless an order is given
rule("..., bounds -> ...", "bucketize.Tensor")
rule("bounds -> ()", "bucketize.Scalar")
rule(to.searched, "searchsorted.Tensor searchsorted.Scalar")
rule(to.is_in, "isin.Tensor_Tensor")
rule("... -> ...", "isin.Tensor_Scalar")

rule(to.bags, "_embedding_bag _embedding_bag_forward_only", empty=False)
rule(to.bags_backward, "_embedding_bag_backward", linear="0", empty=False)
rule("bags! d, v! d, i!, b!, o! -> i!", "_embedding_bag_per_sample_weights_backward", linear="0", empty=False)
