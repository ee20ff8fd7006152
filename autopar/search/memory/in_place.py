"""Find the operands in whose memory the results of ops are: views, and sums of gradients."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from autopar.ir.nodes import operands, tensor_type
from autopar.plan.boundary import ADDITIONS
from autopar.report.liveness import HIDDEN_VIEWS
from autopar.search.problem.ending import Ending
from autopar.torch_private import OpOverload, returns_alias


def is_view(node: fx.Node) -> bool:
    """Return whether the results of an op are in the memory of its first operand."""
    return isinstance(node.target, OpOverload) and (returns_alias(node.target) or node.target in HIDDEN_VIEWS)


def sum_of(addition: fx.Node, sums: Iterable[fx.Node]) -> fx.Node | None:
    """Return the sum of gradients to which an op adds, and which nothing else reads; ``None`` if it does not."""
    if addition.target not in ADDITIONS or not operands(addition):
        return None
    first = operands(addition)[0]
    return first if first in sums and len(first.users) == 1 else None


def operand_in_place(node: fx.Node, sums: Iterable[fx.Node], ending: Ending | None) -> int | None:
    """Return the number of the operand in whose memory the results of an op are; ``None`` if they have their own.

    The first addend of a sum that begins as zero becomes the sum.
    """
    sum = sum_of(node, sums)
    if sum is None:
        return 0 if operands(node) and is_view(node) else None
    if not begins_as_zero(ending):
        return 0
    addend = operands(node)[1] if len(operands(node)) > 1 else sum
    return 1 if addend is not sum and tensor_type(addend).dtype == tensor_type(sum).dtype else None


def begins_as_zero(ending: Ending | None) -> bool:
    """Return whether sums of gradients take no memory until there is a gradient."""
    return ending is not None and ending.microbatches == 1
