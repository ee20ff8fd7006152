"""Read and write the records of nodes, make nodes, and walk over their operands."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, cast

from torch import fx

from autopar.ir.record import Record, TensorType, ValueType
from autopar.torch_private import OpOverload

KEY = "autopar"  # autopar's only key in node.meta


def has_record(node: fx.Node) -> bool:
    """Return whether the node has a record: capture, an edit or the parser made it, and not someone else."""
    return KEY in node.meta


def record_of(node: fx.Node) -> Record:
    return node.meta[KEY]


def tensor_type(node: fx.Node) -> TensorType:
    """Return the type of a node whose value is one tensor."""
    type = record_of(node).type
    assert isinstance(type, TensorType)
    return type


def name_of(placeholder: fx.Node) -> str:
    """Return the user's name of a parameter, a buffer, an input or a state."""
    return record_of(placeholder).name or placeholder.name


def set_record(node: fx.Node, record: Record) -> None:
    node.meta[KEY] = record


def make_node(
    graph: fx.Graph, name: str, op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> fx.Node:
    """Make a node of exactly this name, which the caller has made sure is unique.

    FX gives another name if this one was used in the graph before. FX then knows the name, so that setting it
    afterwards cannot collide with names that FX gives later.

    The arguments are set afterwards, because ``create_node`` walks over those that it is given, in search of symbolic
    sizes, which takes as long as all the rest (torch 2.13).
    """
    node = graph.create_node(op, target, name=name)
    if args:
        node.args = args
    if kwargs:
        node.kwargs = dict(kwargs)
    if node.name != name:
        node.name = name
    return node


def operands(node: fx.Node) -> list[fx.Node]:
    """Return every operand occurrence, in argument order; an operand used twice is listed twice."""
    nodes: list[fx.Node] = []
    for arg in node.args:
        if isinstance(arg, fx.Node):
            nodes.append(arg)
        elif isinstance(arg, (tuple, list)):
            _collect(arg, nodes)
    for arg in node.kwargs.values():
        _collect((arg,), nodes)
    return nodes


PLAIN = frozenset({int, float, bool, str, type(None)})  # long lists of these, such as sizes, are passed over at once


def _collect(values: Any, nodes: list[fx.Node]) -> None:
    if PLAIN.issuperset(map(type, values)):
        return
    for value in values:
        if isinstance(value, fx.Node):
            nodes.append(value)
        elif isinstance(value, (tuple, list)):
            _collect(value, nodes)
        elif isinstance(value, dict):
            _collect(value.values(), nodes)


def behind(values: Iterable[fx.Node], ends: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Return the values, and all nodes that they are computed from. ``ends``: nodes behind which it does not look."""
    ancestors: set[fx.Node] = set()
    open_ = list(values)
    while open_:
        node = open_.pop()
        if node not in ancestors:
            ancestors.add(node)
            open_ += [] if node in ends else node.all_input_nodes
    return ancestors


def map_operands(value: Any, function: Callable[[fx.Node], Any]) -> Any:
    """Replace every node in ``value`` by ``function`` of it, in argument order; lists stay lists."""
    if isinstance(value, fx.Node):
        return function(value)
    if isinstance(value, (tuple, list)):
        if hasattr(value, "_fields"):
            return value
        return type(value)(value if PLAIN.issuperset(map(type, value)) else (map_operands(v, function) for v in value))
    if isinstance(value, Mapping):
        return {key: map_operands(v, function) for key, v in value.items()}
    return value


def alike(value: Any, other: Any) -> bool:
    """Whether two arguments mean the same: operands have the same name, and numbers the same type, sign and digits."""
    kind = value.__class__
    if kind is not other.__class__:
        return False
    if kind is fx.Node:
        return value.name == other.name
    if isinstance(value, (tuple, list)):
        return len(value) == len(other) and all(map(alike, value, other))
    if isinstance(value, dict):
        return list(value) == list(other) and all(map(alike, value.values(), other.values()))
    return value == other if kind in (int, bool, str) else repr(value) == repr(other)


def is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem


def called_op(node: fx.Node) -> OpOverload:
    """Return what a node calls, as a key of the tables of ops; nothing is checked."""
    return cast(OpOverload, node.target)


def node_at(node: fx.Node, position: int = 0) -> fx.Node:
    """Return the argument at a position, which is a node."""
    argument = node.args[position]
    assert isinstance(argument, fx.Node)
    return argument


def element_of(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the operand and the index of a ``getitem`` node."""
    source, index = node.args
    assert isinstance(source, fx.Node) and isinstance(index, int)
    return source, index


def element_type(node: fx.Node) -> ValueType:
    """Return the type of a ``getitem`` node, an element of its operand's type."""
    source, index = element_of(node)
    types = record_of(source).type
    assert isinstance(types, tuple)
    return types[index]
