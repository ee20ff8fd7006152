"""Divide the ops of a step into classes, for tables of time."""

from __future__ import annotations

from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import record_of
from autopar.ir.text.printer import target_name

MATMUL, ATTENTION, CONVOLUTION = "matmul", "attention", "convolution"
NORMALIZATION, INDEXING, REDUCTION = "normalization", "indexing", "reduction"
LAYOUT, POINTWISE, OPTIMIZER, COMMUNICATION = "copies and views", "pointwise", "optimizer", "communication"

# class → words in the names of its ops; the first class that has one
WORDS: dict[str, tuple[str, ...]] = {
    ATTENTION: ("attention",),
    CONVOLUTION: ("convolution",),
    NORMALIZATION: ("norm",),
    INDEXING: ("embedding", "index", "gather", "scatter", "look_up", "select_backward", "nll_loss"),
}
# class → names of its ops, without the overload
NAMES: dict[str, frozenset[str]] = {
    MATMUL: frozenset({"mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "mv", "dot", "addmv"}),
    REDUCTION: frozenset({
        "sum", "mean", "amax", "amin", "max", "min", "prod", "var", "var_mean", "logsumexp", "cumsum", "argmax",
        "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "squares",
    }),
    LAYOUT: frozenset({
        "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice",
        "slice_backward", "select", "split", "split_with_sizes", "cat", "stack", "clone", "copy", "_to_copy", "alias",
        "detach", "constant_pad_nd", "full", "zeros", "ones", "empty", "zeros_like", "full_like", "arange",
    }),
}  # fmt: skip


def class_of_op(node: fx.Node) -> str:
    """Return the class of a line of a program."""
    row = transfers.BY_FUNCTION.get(node.target)
    if row is not None:
        return COMMUNICATION if row.collective or node.target is transfers.wait else LAYOUT
    if record_of(node).phase == "update":
        return OPTIMIZER
    name = target_name(node.target).rpartition("::")[2].partition(".")[0]
    by_name = next((kind for kind, names in NAMES.items() if name in names), None)
    by_word = (kind for kind, words in WORDS.items() if any(word in name for word in words))
    return by_name or next(by_word, POINTWISE)
