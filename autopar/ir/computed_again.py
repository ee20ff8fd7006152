"""Find values that a program computes twice: the same op of the same values, as the backward computes again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx

from autopar.ir.nodes import is_getitem, map_operands, record_of
from autopar.ir.program import Program


def computed_again(program: Program, values: Collection[fx.Node]) -> dict[fx.Node, int]:
    """Return a number for each of some values, equal for those that are computed alike; linear in the program.

    Nothing is returned where no two of the values may be alike: few programs have any.
    """
    alike: dict[object, int] = {}
    for value in values:
        kind = value.target, record_of(value).type
        alike[kind] = alike.get(kind, 0) + (value.op == "call_function")
    phases = {record_of(value).phase for value in values}
    if len(phases) < 2 or all(count < 2 for count in alike.values()):
        return {}
    known: dict[object, int] = {}
    numbers: dict[fx.Node, int] = {}
    for node in program.nodes:
        key: object = node
        if node.op == "call_function":
            args, kwargs = (
                map_operands(given, lambda n: _Number(numbers[n])) for given in (node.args, dict(node.kwargs))
            )
            key = node.target, hashable(args), hashable(kwargs), None if is_getitem(node) else record_of(node).type
        numbers[node] = known.setdefault(key, len(known))
    return {value: numbers[value] for value in values}


class _Number(int):
    """The number of an operand, which is no argument."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Number) and int(self) == int(other)

    def __hash__(self) -> int:
        return hash(("operand", int(self)))


def hashable(value: Any) -> Any:
    """Return arguments of a node as something that compares by value."""
    if isinstance(value, (tuple, list)):
        return tuple(map(hashable, value))
    if isinstance(value, dict):
        return tuple(sorted((key, hashable(one)) for key, one in value.items()))
    return (value.__class__, value)
