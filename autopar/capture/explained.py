"""Explain torch's errors during a capture, by tables: a part of the message, what happens, and the remedy."""

from __future__ import annotations

import os
import traceback

from autopar.capture.provenance import Origin
from autopar.errors import CaptureError, at_line
from autopar.ir.dense import REMEDIES

EXPLAINED: tuple[tuple[str, str, str], ...] = (  # a piece of torch's message, what happens, the remedy
    (
        "use_reentrant",
        "the model checkpoints with use_reentrant=True, which runs a backward of its own",
        "checkpoint with use_reentrant=False",
    ),
    (
        "modified by an inplace operation",
        "forward writes over a value that the backward needs",
        "take a copy of it before it is written, with clone()",
    ),
    (
        "cached during selective activation checkpoint has been mutated",
        "an op writes over a value that a selective checkpoint keeps",
        "checkpoint without context_fn, or let it save no results of random and in-place ops",
    ),
    (
        "NestedTensor",
        "a nested tensor is made, as by the fast path of TransformerEncoder in evaluation",
        "it is no part of a static graph: torch.backends.mha.set_fastpath_enabled(False), here and in eager",
    ),
    ("_nested_tensor_from_tensor_list", "forward makes a nested tensor, which has no pieces", REMEDIES["nested"]),
    ("torch/nested/", "forward makes a nested tensor, which has no pieces", REMEDIES["nested"]),
    ("OpaqueTensorImpl", "forward makes a tensor in oneDNN's own layout, which has no pieces", REMEDIES["mkldnn"]),
    (
        "HigherOrderOperator cond ",
        "torch.cond runs one of two functions, as the values of a tensor say, so it is not one static graph",
        "compute both, and choose with torch.where(condition, a, b)",
    ),
    (
        "HigherOrderOperator while_loop",
        "torch.while_loop ends as the values of its tensors say, so it is not one static graph",
        "write a Python loop over a fixed number of steps; torch.where keeps finished elements unchanged",
    ),
    (
        "HigherOrderOperator scan ",
        "scan keeps its steps as a graph of its own, which capture cannot look into",
        "write a Python loop over x.unbind(dim), and put the results together with torch.stack",
    ),
    (
        "HigherOrderOperator associative_scan",
        "associative_scan keeps its steps as a graph of its own, which capture cannot look into",
        'pass combine_mode="generic", or use torch.cumsum, cumprod, cummax or logcumsumexp',
    ),
    (
        "HigherOrderOperator map_impl ",
        "map keeps its function as a graph of its own, which capture cannot look into",
        "use torch.vmap, or a Python loop over x.unbind(0) and torch.stack",
    ),
    (
        "HigherOrderOperator flex_attention",
        "flex_attention keeps its functions as graphs of their own, which capture cannot look into",
        "use scaled_dot_product_attention, with attn_mask for the mask or for the numbers that are added to the scores",
    ),
    (
        "HigherOrderOperator",
        "forward calls an operator that takes functions, which capture cannot look into",
        "write what it does as plain ops",
    ),
    (
        "dynamo-optimized function",
        "forward calls a function that torch.compile has made, which capture cannot look into",
        "call the function itself",
    ),
    (
        "Expected inputs of BF16 type",
        "torch has no fake kernel of a grouped matrix product in this dtype",
        "compute in bfloat16, or let the experts be a batched product: "
        'experts_implementation="batched_mm" in transformers',
    ),
    (
        ".numpy() is not supported",
        "forward asks for a tensor's values, for NumPy",
        "stay in torch, or do it outside of forward",
    ),
    (
        "data is not allocated yet",
        "forward asks for a tensor's values, as torch.tensor does of a list of tensors",
        "put tensors together with torch.stack",
    ),
    (
        "no fake impl registered",
        "an op has no fake kernel, so its result's shape is not known before it runs",
        "give it one: torch.library.register_fake",
    ),
    (
        "output has alias annotations",
        "an op of your own writes into its argument in a way that cannot be made functional",
        "let it return a new tensor, with mutates_args=()",
    ),
)

# a piece of the line that reads values, or of the op's name; how to compute the same without reading them
IN_THE_GRAPH: tuple[tuple[str, str], ...] = (
    (
        "expert",
        "let the experts be a batched product, where the model has one: "
        'model.set_experts_implementation("batched_mm") in transformers',
    ),
    ("masked_select", "keep all elements, and let those that are left out count nothing, with torch.where"),
    ("interpolate(", "compute the sizes outside of forward, and pass them as Python numbers"),
    ("_index[i]", "select with torch.index_select or torch.gather, and roll with torch.gather"),
    ("pack_padded", "keep sequences padded, and take what counts with torch.where or an index"),
    ("ctc_loss", "return its inputs from forward, and compute the loss afterwards"),
    ("linalg_lstsq", "write it as a product: torch.linalg.pinv(a) @ b"),
    (
        "cov(",
        "write it as a product of the centred rows, which are the rows minus their means, divided by their length "
        "minus the correction",
    ),
    (
        "corrcoef(",
        "write it as a product of the centred rows, which are the rows minus their means, divided by their norms",
    ),
    ("", "keep the choice inside the graph with torch.where, or move it out of forward"),
)


class ReadsValues(CaptureError):
    """The step depends on the values of its tensors."""


def values_read(origin: Origin, cause: Exception) -> ReadsValues:
    """Return the error for a step that depends on the values of its tensors."""
    text = f"{origin.source.partition('  ')[2]} {cause}"  # without the name of the file
    remedy = next(remedy for piece, remedy in IN_THE_GRAPH if piece in text)
    return ReadsValues(
        f"the step depends on the values of its tensors, so it is not one static graph\n"
        f"    {origin.source or 'unknown line'}\n"
        f"  it reads them with {str(cause).splitlines()[0]} (.item(), bool(), nonzero and the like)\n"
        f"  {remedy}"
    )


def number_of_rows(error: Exception, origin: Origin) -> CaptureError | None:
    """Return the error for a size that is the number of rows that a mask selects; ``None`` for another error."""
    if not isinstance(error, TypeError) or "must be tuple of ints" not in str(error):
        return None
    return CaptureError(
        f"forward makes a tensor of as many rows as a mask selects, and their number is a value\n"
        f"{at_line(origin.source, origin.module)}\n"
        f"  make it of the rows, with torch.ones_like and its like, or compute with all rows"
    )


def explained(error: Exception, origin: Origin) -> CaptureError | None:
    """Return an error that the user can act on; ``None`` if the table has no row for this one."""
    text = f"{error}{_through_nested(error)}"
    row = next((row for row in EXPLAINED if row[0] in text), None)
    return None if row is None else CaptureError(f"{row[1]}\n{at_line(origin.source, origin.module)}\n  {row[2]}")


def _through_nested(error: Exception) -> str:
    """Return ``torch/nested/`` if an error went through the package of jagged tensors.

    Its message does not mention them.
    """
    files = (frame.f_code.co_filename.replace(os.sep, "/") for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((" torch/nested/" for name in files if "/torch/nested/" in name), "")
