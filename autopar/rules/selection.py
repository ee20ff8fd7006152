"""Elements written or found by their place, by a mask or by order. What is looked into stays whole."""

from __future__ import annotations

from autopar.rules.dims import all_whole, along, elements, names, ndim, tensor, wholes
from autopar.rules.registry import rule

# places along one dim are written; later elements overwrite earlier ones
rule(along("whole, i! -> whole", 1), "index_fill.int_Scalar")
rule(along("whole, i!, () -> whole", 1), "index_fill.int_Tensor", linear="0+2")
rule(along("whole, i!, part -> whole", 1), "index_copy", linear="0+2")
rule(along("whole, i!, part -> whole", 1), "index_reduce")


def _scatter_reduce(x, dim: int, index, source, reduce: str, **_) -> str:
    """Sums would come apart along the index too; maxima and means would not."""
    if index.shape != source.shape:
        return all_whole(x, index, source, results=tensor(f"a{k}!" for k in range(ndim(x))))
    table, picked = elements(x, dim, index)
    return f"{table}, {picked}, {picked} -> {table}"


rule(_scatter_reduce, "scatter_reduce.two", linear=lambda x, dim, index, source, reduce, include_self=True: "0+2" * (reduce == "sum" and include_self))
rule(lambda x, index: f"{tensor(wholes(ndim(x)).split())}, ... -> ...", "take", linear="0")
rule(lambda x, *rest: all_whole(x, *rest[:2], results=tensor(f"a{k}!" for k in range(ndim(x)))), "put", linear="0+2")

# which value goes where depends on all of the mask
rule(lambda x, mask, source: all_whole(x, mask, source, results=wholes(max(ndim(x), ndim(mask))) or "()"), "masked_scatter", linear="0+2")
rule(lambda gradient, mask, sizes: all_whole(gradient, mask, results=wholes(len(sizes)) or "()"), "masked_scatter_backward", linear="0")

# the place of each value in a sorted row is the number of those before it: counts add up, unless an order is given
rule("..., bounds -> ...", "bucketize.Tensor")
rule("bounds -> ()", "bucketize.Scalar")


def _searched(rows, *_, sorter=None, **__) -> str:
    """One row for all values, or a row for each row of them."""
    s = "s" if sorter is None else "s!"
    return f"{s}, ..., {s} -> ..." if ndim(rows) == 1 else f"... {s}, ... v, ... {s} -> ... v"


rule(_searched, "searchsorted.Tensor")
rule(lambda rows, *_, sorter=None, **__: "s, s -> ()" if sorter is None else "s!, s! -> ()", "searchsorted.Scalar")


def _is_in(x, among, *, invert: bool = False, **_) -> str:
    """It is among all where it is among some."""
    return f"..., {tensor(names(ndim(among)))} -> ... by {'min' if invert else 'max'}"


rule(_is_in, "isin.Tensor_Tensor")
rule("... -> ...", "isin.Tensor_Scalar")


def _bags(weight, indices, offsets, by_frequency: bool = False, mode: int = 0, *_) -> str:
    """Bags of indices are summed row by row: columns come apart. What all ranks have alike is the maximum of theirs."""
    return f"v! d, i!, b!, i! -> bags! d, o!, sizes!, {'places! d' if mode == 2 else 'places!'} by max"


def _bags_backward(gradient, indices, offsets, into, sizes, places, count: int, by_frequency: bool, mode: int, *_) -> str:
    return f"bags! d, i!, b!, o!, sizes!, {'places! d' if mode == 2 else 'places!'}, i! -> v! d"


rule(_bags, "_embedding_bag _embedding_bag_forward_only", empty=False)
rule(_bags_backward, "_embedding_bag_backward", linear="0", empty=False)
rule("bags! d, v! d, i!, b!, o! -> i!", "_embedding_bag_per_sample_weights_backward", linear="0", empty=False)
