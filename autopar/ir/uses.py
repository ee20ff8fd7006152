"""Replace uses, one user at a time: a node's arguments are rebuilt once, however many of its operands change.

The output node reads every gradient. Rebuilding it once for each gradient would make a pass quadratic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from autopar.errors import EditError
from autopar.ir.nodes import map_operands, operands


class _Swaps:
    """The changes in one user: operands at positions, or all occurrences of operands."""

    __slots__ = ("at", "everywhere", "new")

    def __init__(self) -> None:
        self.new: set[fx.Node] = set()  # the values of ``everywhere``
        self.at: dict[int, tuple[fx.Node, fx.Node]] = {}
        self.everywhere: dict[fx.Node, fx.Node] | None = None


class UseReplacements:
    """A batch of replacements that do not depend on each other's order."""

    def __init__(self) -> None:
        self._users: dict[fx.Node, _Swaps] = {}
        self._touched: set[fx.Node] = set()

    def clear(self) -> None:
        self._users.clear()
        self._touched.clear()

    def touches(self, value: fx.Node) -> bool:
        """Return whether the readers of ``value`` are known only after the batch has been carried out."""
        return value in self._touched

    def depends_on(self, user: fx.Node, old: fx.Node, index: int | None) -> bool:
        """Return whether a replacement must wait until the batch has been carried out."""
        swaps = self._users.get(user)
        if swaps is None:
            return False
        if index is None:
            return bool(swaps.at) or old in (swaps.everywhere or {}) or old in swaps.new
        return index in swaps.at or bool(swaps.everywhere)

    def add(self, user: fx.Node, old: fx.Node, new: fx.Node, index: int | None) -> None:
        swaps = self._users.get(user)
        if swaps is None:
            swaps = self._users[user] = _Swaps()
        if index is None:
            swaps.everywhere = swaps.everywhere or {}
            swaps.everywhere[old] = new
            swaps.new.add(new)
        else:
            swaps.at[index] = (old, new)
        self._touched.add(old)
        self._touched.add(new)

    def rebuilt(self) -> Iterator[tuple[fx.Node, Any, Any]]:
        """Yield (user, args, kwargs) for each user; ``EditError`` if a user does not read an operand to be replaced."""
        for user, swaps in self._users.items():
            yield user, *_rebuild(user, swaps)

    def take(self, user: fx.Node) -> tuple[Any, Any]:
        """Return (args, kwargs) of one user and drop it from the batch; ``EditError`` as above."""
        return _rebuild(user, self._users.pop(user))


def _rebuild(user: fx.Node, swaps: _Swaps) -> tuple[Any, Any]:
    """Return the new arguments; unchanged ones are the same objects."""
    args = _rebuild_flat(user.args, swaps)
    if args is not None:
        return args, user.kwargs
    position = -1
    missing: dict[tuple[fx.Node, int | None], None] = {(old, index): None for index, (old, _) in swaps.at.items()}
    everywhere = swaps.everywhere or {}
    missing.update({(old, None): None for old in everywhere})

    def swap(operand: fx.Node) -> fx.Node:
        nonlocal position
        position += 1
        old, new = swaps.at.get(position, (operand, everywhere.get(operand)))
        if new is None or operand is not old:
            return operand
        missing.pop((old, None if operand in everywhere else position), None)
        return new

    args = map_operands(user.args, swap)
    kwargs = map_operands(dict(user.kwargs), swap) if user.kwargs else user.kwargs
    for old, index in missing:
        where = "" if index is None else f" as operand {index}"
        read = ", ".join(operand.name for operand in operands(user))
        raise EditError(f"{user.name} does not read {old.name}{where}; it reads {read}")
    return args, kwargs


def _rebuild_flat(args: tuple[Any, ...], swaps: _Swaps) -> tuple[Any, ...] | None:
    """Return the new arguments in the simplest case: operands by position, each an argument of its own.

    ``None`` in other cases.
    """
    if swaps.everywhere:
        return None
    at, new, position, left = swaps.at, list(args), 0, len(swaps.at)
    for k, arg in enumerate(args):
        if isinstance(arg, fx.Node):
            if position in at:
                old, new[k] = at[position]
                if old is not arg:
                    return None
                left -= 1
                if not left:
                    return tuple(new)
            position += 1
        elif isinstance(arg, (tuple, list, dict)):
            return None
    return None
