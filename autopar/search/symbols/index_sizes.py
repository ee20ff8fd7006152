"""Find how many indices there are at other sizes, in what a plan's expansions number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx

from autopar.capture.decompose.expanded import ARANGE, expansion_of
from autopar.capture.decompose.expansions import opened_factors
from autopar.costs.symbolic import NoExpression, Size
from autopar.ir.nodes import record_of


def size_of_places(
    node: fx.Node, traced: Sequence[Mapping[str, fx.Node]], fitted: Callable[[Sequence[int]], Size]
) -> Size | None:
    """Return the size of an op that numbers indices; ``None`` if no op of its line is expanded so.

    Args:
        traced: of each capture, name → node.
        fitted: returns the expression of a size that has some values in the captures.

    Raises:
        NoExpression: ops of the line number different dims.
    """
    record = record_of(node)
    place, found = (record.module, record.source, record.phase), dict[Size, None]()
    for name, first in traced[0].items():
        own = record_of(first)
        if first.op != "call_function" or (own.module, own.source, own.phase) != place or not opened_factors(first):
            continue
        nodes = [each.get(name) for each in traced]
        sizes = [_indices(each) for each in nodes]
        if sizes[0] == node.args[0] and None not in sizes:
            found[fitted(sizes)] = None  # type: ignore[arg-type]
    if len(found) > 1:
        raise NoExpression("ops of this line number dims that grow differently")
    return next(iter(found), None)


def _indices(node: fx.Node | None) -> int | None:
    """Return how many indices the expansion of an op numbers."""
    if node is None or not opened_factors(node):
        return None
    return next((step.args[0] for step in expansion_of(node).steps if step.target is ARANGE), None)
