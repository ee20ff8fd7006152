"""Errors of torch's that a capture runs into, in the user's words: tables of what they say, what that means, and what to do."""

from __future__ import annotations

from autopar.errors import CaptureError, at_line
from autopar.provenance import Origin

EXPLAINED: tuple[tuple[str, str, str], ...] = (  # a piece of torch's message, what happens, the remedy
    ("use_reentrant", "the model checkpoints with use_reentrant=True, which runs a backward of its own", "checkpoint with use_reentrant=False"),
    ("modified by an inplace operation", "forward writes over a value that the backward needs", "take a copy of it before it is written, with clone()"),
    ("cached during selective activation checkpoint has been mutated", "an op writes over what a selective checkpoint keeps",
     "checkpoint without context_fn, or keep random and in-place ops out of what it saves"),
    ("NestedTensor", "a nested tensor is made, as by the fast path of TransformerEncoder in evaluation",
     "it is no part of a static graph: torch.backends.mha.set_fastpath_enabled(False), here and in eager"),
    ("Expected inputs of BF16 type", "torch has no fake kernel of a grouped matrix product in this dtype",
     'compute in bfloat16, or let the experts be a batched product: experts_implementation="batched_mm" in transformers'),
    (".numpy() is not supported", "forward asks for a tensor's values, for NumPy", "stay in torch, or do it outside of forward"),
    ("data is not allocated yet", "forward asks for a tensor's values, as torch.tensor does of a list of tensors", "put tensors together with torch.stack"),
    ("no fake impl registered", "an op has no fake kernel, so its result's shape is not known before it runs", "give it one: torch.library.register_fake"),
    ("output has alias annotations", "an op of your own writes into its argument in a way that cannot be made functional",
     "let it return a new tensor, with mutates_args=()"),
)  # fmt: skip

IN_THE_GRAPH: tuple[tuple[str, str], ...] = (  # a piece of the line that reads values, or of the op's name; how to have the same without
    ("expert", 'let the experts be a batched product, where the model has one: model.set_experts_implementation("batched_mm") in transformers'),
    ("pack_padded", "keep sequences padded, and take what counts with torch.where or an index"),
    ("ctc_loss", "return what goes into it from forward, and take the loss of that afterwards"),
    ("linalg_lstsq", "write it as a product: torch.linalg.pinv(a) @ b"),
    ("cov(", "write it as a product of what is left of the rows without their means, divided by their length less the correction"),
    ("corrcoef(", "write it as a product of what is left of the rows without their means, divided by the norms of that"),
    ("", "keep the choice inside the graph with torch.where, or move it out of forward"),
)  # fmt: skip


def values_read(origin: Origin, cause: Exception) -> CaptureError:
    """The refusal of a step that depends on the values of its tensors."""
    text = f"{origin.source.partition('  ')[2]} {cause}"  # not the name of the file
    remedy = next(remedy for piece, remedy in IN_THE_GRAPH if piece in text)
    return CaptureError(
        f"the step depends on the values of its tensors, so it is not one static graph\n"
        f"    {origin.source or 'unknown line'}\n"
        f"  it reads them with {str(cause).splitlines()[0]} (.item(), bool(), nonzero and the like)\n"
        f"  {remedy}"
    )


def explained(error: Exception, origin: Origin) -> CaptureError | None:
    """The error as the user can act on it; ``None`` where the table does not know it."""
    row = next((row for row in EXPLAINED if row[0] in str(error)), None)
    return None if row is None else CaptureError(f"{row[1]}\n{at_line(origin.source, origin.module)}\n  {row[2]}")
