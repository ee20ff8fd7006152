"""Shard ops that only regroup or reorder elements. Pending values may wait through them."""

from __future__ import annotations

from autopar.rules import regroup as to
from autopar.rules.dims import along, every
from autopar.rules.registry import rule

rule(to.view, "view _unsafe_view reshape view_copy", linear="0", sizes={1: "*"}, view=True)
rule(to.expand, "expand expand_copy", linear="0", sizes={1: "*"}, view=True)
rule(to.unsqueeze, "unsqueeze unsqueeze_copy", linear="0", view=True)
rule(
    to.squeeze,
    "squeeze squeeze.dim squeeze.dims squeeze_copy squeeze_copy.dim squeeze_copy.dims",
    linear="0",
    view=True,
)
rule(to.reordered(lambda dims: dims[::-1]), "t t_copy", linear="0", view=True)
rule(to.reordered(to.swap), "transpose.int transpose_copy.int", linear="0", view=True)
rule(to.reordered(lambda dims, order: [dims[k] for k in order]), "permute permute_copy", linear="0", view=True)

# a slice of one dim, and its backward: the slice at its position among zeros
rule(to.sliced("whole -> part", 1), "slice.Tensor slice_copy.Tensor", linear="0", sizes=to.slice_bounds(1), view=True)
rule(along("whole -> part", 1, default=0), "narrow_copy", linear="0", view=True)
rule(along("whole -> gone", 1), "select.int select_copy.int", linear="0", view=True)
rule(to.sliced("part -> whole", 2, of=1), "slice_backward", linear="0", sizes={1: "*", **to.slice_bounds(2)})
rule(along("gone -> whole", 2, of=1), "select_backward", linear="0", sizes={1: "*"})
rule(to.sliced("whole, part -> whole", 2), "slice_scatter", linear="0+1", sizes=to.slice_bounds(2))
rule(along("whole, gone -> whole", 2), "select_scatter", linear="0+1")
rule(to.diagonal("square -> diagonal"), "diagonal diagonal_copy", linear="0", view=True)
rule(to.diagonal("diagonal -> square", of=1, where=2), "diagonal_backward", linear="0", sizes={1: "*"})
rule(to.diagonal("diagonal -> square", more=1, last=True), "diag_embed", linear="0")
rule(to.diagonal("square, diagonal -> square", where=2), "diagonal_scatter", linear="0+1")
rule(to.unfold("whole -> windows"), "unfold unfold_copy", linear="0", view=True)
rule(to.unfold("windows -> whole", of=1), "unfold_backward", linear="0", sizes={1: "*"})

# several tensors
rule(to.cat, "cat", linear=lambda tensors, dim=0: every(len(tensors)))
rule(to.stack, "stack", linear=lambda tensors, dim=0: every(len(tensors)))
rule(to.numbers, "autopar::over_stages", linear=lambda values, *_: every(len(values)))
rule(
    to.split,
    "split_with_sizes split_with_sizes_copy unsafe_split_with_sizes",
    linear="0",
    sizes={1: to.split_sizes},
    view=True,
)
rule(to.unbind, "unbind.int unbind_copy.int", linear="0", view=True)

# elements move, are repeated, or get padding
rule(along("whole -> whole", 1), "flip", linear="0", view=True)
rule(along("whole -> whole", 2), "roll", linear="0", view=True)
rule(to.turned, "rot90", linear="0", view=True)
rule("... i! j! -> ... i! j!", "tril triu", linear="0")
rule(to.repeat, "repeat", linear="0")
rule(to.pad, "constant_pad_nd", linear=lambda x, pad, value=0: "" if value else "0")
