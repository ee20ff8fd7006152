"""Read and write the records of nodes, make nodes, and walk over their operands."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx

from autopar.ir.record import Record, ValueType

KEY = "autopar"  # the one key of node.meta that is ours


def has_record(node: fx.Node) -> bool:
    """Whether the node was made by capture, an edit or the parser, and not behind their back."""
    return KEY in node.meta


def record_of(node: fx.Node) -> Record:
    return node.meta[KEY]


def name_of(placeholder: fx.Node) -> str:
    """The user's name of a parameter, a buffer, an input, a state."""
    return record_of(placeholder).name or placeholder.name


def set_record(node: fx.Node, record: Record) -> None:
    node.meta[KEY] = record


def make_node(graph: fx.Graph, name: str, op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
    """A node of exactly this name; uniqueness is the caller's duty.

    FX gives another name where one was used in the graph before; then it knows that name, and setting it afterwards
    cannot collide with names FX will give later.
    """
    node = graph.create_node(op, target, args, dict(kwargs), name=name)
    if node.name != name:
        node.name = name
    return node


def operands(node: fx.Node) -> list[fx.Node]:
    """Every operand occurrence, in argument order; an operand used twice is listed twice."""
    found: list[fx.Node] = []
    for arg in node.args:
        if isinstance(arg, fx.Node):
            found.append(arg)
        elif isinstance(arg, (tuple, list)):
            _collect(arg, found)
    for arg in node.kwargs.values():
        _collect((arg,), found)
    return found


def _collect(values: Any, found: list[fx.Node]) -> None:
    for value in values:
        if isinstance(value, fx.Node):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)


def behind(values: Iterable[fx.Node]) -> set[fx.Node]:
    """The values, and all that they are made of."""
    found: set[fx.Node] = set()
    open_ = list(values)
    while open_:
        node = open_.pop()
        if node not in found:
            found.add(node)
            open_ += node.all_input_nodes
    return found


def map_operands(value: Any, function: Callable[[fx.Node], Any]) -> Any:
    """``value`` with every node in it replaced, in argument order; lists stay lists."""
    if isinstance(value, fx.Node):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map_operands(v, function) for v in value) if not hasattr(value, "_fields") else value
    if isinstance(value, Mapping):
        return {key: map_operands(v, function) for key, v in value.items()}
    return value


def is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem


def element_type(node: fx.Node) -> ValueType:
    """The type of a ``getitem`` node, read off its operand."""
    source, index = node.args
    types = record_of(source).type  # type: ignore[arg-type]
    assert isinstance(types, tuple)
    return types[index]  # type: ignore[index]
