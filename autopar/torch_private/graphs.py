"""Edit graphs of torch.fx in less time than their public methods take."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

# tried on 2.11 to 2.15: functions that take arguments in a list and empty it
BoxedCodeGen = torch.fx.graph._BoxedCodeGen


inputs_of = operator.attrgetter(
    "_input_nodes"
)  # tried on 2.11 to 2.15: the operands of a node, without the list of all_input_nodes


is_erased = operator.attrgetter("_erased")  # tried on 2.11 to 2.15


def call_inserter(
    graph: fx.Graph, made: dict[fx.Node, Any]
) -> Callable[[fx.Node, str, Any, tuple[Any, ...], dict[str, Any], Any], fx.Node]:
    """Return ``Graph.call_function`` in front of a node, with this name.

    If the name has been used before, a number is appended. It omits what takes half of the time: an insertion point,
    checks of the arguments for symbolic numbers, hooks. ``about`` is written to ``made`` before the node becomes part
    of the graph. Tried on 2.11 to 2.15.
    """
    names = graph._graph_namespace
    used, named, tabled = names._used_names, names._obj_to_name, graph._find_nodes_lookup_table.insert

    def insert(
        before: fx.Node, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], about: Any
    ) -> fx.Node:
        if name in used:
            name = names.create_name(name, None)
        made[node := fx.Node(graph, name, "call_function", target, args, kwargs)] = about
        used.add(name)
        named[node] = name
        before._prepend(node)
        tabled(node)
        graph._len += 1
        return node

    return insert


def set_arguments(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Set ``node.args`` and ``node.kwargs`` and update users, without a table update for each.

    Tried on 2.11 to 2.15.
    """
    node._update_args_kwargs(args, kwargs)


def rename(node: fx.Node, name: str) -> None:
    """Name a node, with a number appended if another node has the name. Tried on 2.11 to 2.15."""
    node._rename(name)


def tables_of(graph: fx.Graph, nodes: Iterable[fx.Node]) -> dict[Any, list[fx.Node]]:
    """Return the rows of ``Graph.find_nodes`` that contain the nodes. Tried on 2.11 to 2.15."""
    lookup = graph._find_nodes_lookup_table
    return {key: list(lookup.table[key]) for key in {lookup._key(node) for node in nodes}}


def relink(
    graph: fx.Graph, order: Sequence[fx.Node], gone: Collection[fx.Node], tables: Mapping[Any, Sequence[fx.Node]]
) -> None:
    """Make ``order`` the nodes of a graph, without those in ``gone``. Tried on 2.11 to 2.15.

    ``tables`` come from ``tables_of``. After an interrupt it may be called again.
    """
    lookup, names = graph._find_nodes_lookup_table, graph._graph_namespace
    write = object.__setattr__  # Node's own method would first remove the node from a table
    for key, row in tables.items():
        lookup.table[key] = dict.fromkeys(row)
    for node in gone:
        write(node, "_erased", True)
        node._update_args_kwargs((), {})
        lookup.table[lookup._key(node)].pop(node, None)
        names._used_names.discard(node.name)
        names._obj_to_name.pop(node, None)
    for node in order:
        write(node, "_erased", False)
    for node, following in itertools.pairwise((graph._root, *order, graph._root)):
        write(node, "_next", following)
        write(following, "_prev", node)
    graph._len = len(order)


def positional_arguments(program: torch.export.ExportedProgram) -> int:
    """Return how many arguments an exported program takes by position. Tried on 2.11 to 2.15."""
    return program.call_spec.in_spec.children()[0].num_children
