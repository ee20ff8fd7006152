"""Choose the layout in which all readers read a pending value, so that it is reduced once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from autopar.ir.layout import Layout, layout_of
from autopar.ir.nodes import operands
from autopar.ir.record import Requirement, TensorType, ValueType
from autopar.plan.choice import place_of

# reader → what it would require of its operands now; ``None`` for the output, elements, and ops whose operands are not
# all placed
NeedsOf = Callable[[fx.Node], Sequence[Requirement | None] | None]


def common_layout(
    node: fx.Node, type: TensorType, made_from: Sequence[tuple[ValueType, Requirement | None]], needs_of: NeedsOf
) -> Layout | None:
    """Return the layout in which all readers read a pending value; ``None``: each reads it as it needs it.

    It is reduced to the split of an operand of its shape that was gathered for its op (so the gradient of keys is
    split as the keys were), or to the split that one reader needs, if all readers need it reduced. Else, if one
    reader needs it reduced with its splits unchanged, all read it so, because then it need not be kept in both
    forms.

    Args:
        type: its type, with a pending Layout.
        made_from: the operands of its op, each as it is read and as the op requires it.
    """
    split = _gathered_alike(type, made_from) or _needed_split(node, type, needs_of)
    if (
        split is None
        and len(node.users) > 1
        and any(_needs_reduced(node, type, needs_of(user), user) for user in node.users)
    ):
        split = layout_of(type.mesh, type.attr.without_pending())
    return split


def _gathered_alike(type: TensorType, made_from: Sequence[tuple[ValueType, Requirement | None]]) -> Layout | None:
    pending = {axis for axis, _ in type.attr.pending}
    for home, need in made_from:
        if need is not None and isinstance(home, TensorType) and home.shape == type.shape and not home.attr.pending:
            given_up = pending.intersection(home.attr.axes) - set(need.placed.attr.axes)
            if given_up == pending and type.attr.without_pending() == need.placed.attr:
                return home.layout
    return None


def _needed_split(node: fx.Node, type: TensorType, needs_of: NeedsOf) -> Layout | None:
    split = None
    for user in node.users:
        needs = needs_of(user)
        if needs is None:
            return None
        for value, need in zip(operands(user), needs, strict=True):
            if value is node and need is not None:
                if set(need.placed.attr.pending) & set(type.attr.pending):
                    return None
                if any(place_of(axis, need.placed.attr) for axis, _ in type.attr.pending):
                    split = split or need.layout
    return split


def _needs_reduced(node: fx.Node, type: TensorType, needs: Sequence[Requirement | None] | None, user: fx.Node) -> bool:
    """Return whether a reader needs a pending value reduced, with its splits unchanged."""
    whole = type.attr.without_pending()
    return needs is not None and any(
        value is node and need is not None and need.placed.attr == whole
        for value, need in zip(operands(user), needs, strict=True)
    )
