"""Private parts of ``torch.fx`` graphs and nodes; see ``torch_private`` for all others. Each was tried on 2.13."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

inputs_of = operator.attrgetter("_input_nodes")  # tried on 2.13: what a node reads, without the list of all_input_nodes
is_erased = operator.attrgetter("_erased")  # tried on 2.13


def call_inserter(graph: fx.Graph, made: dict[fx.Node, Any]) -> Callable[[fx.Node, str, Any, tuple[Any, ...], Mapping[str, Any], Any], fx.Node]:
    """``Graph.call_function`` in front of a node, with this name or, where it was used before, with a number behind it.

    Without what takes half of its time: an insertion point, looks at the arguments for symbolic numbers, hooks. What is said about a
    node is written to ``made`` before the node is part of the graph. Tried on 2.13.
    """
    names = graph._graph_namespace
    used, named, tabled = names._used_names, names._obj_to_name, graph._find_nodes_lookup_table.insert

    def insert(before: fx.Node, name: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], about: Any) -> fx.Node:
        if name in used:
            name = names.create_name(name, None)
        made[node := fx.Node(graph, name, "call_function", target, args, kwargs)] = about  # type: ignore[arg-type]
        used.add(name)
        named[node] = name
        before._prepend(node)
        tabled(node)
        graph._len += 1
        return node

    return insert


def set_arguments(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """``node.args = args; node.kwargs = kwargs``, users kept, without taking the node out of a table for each. Tried on 2.13."""
    node._update_args_kwargs(args, kwargs)


def rename(node: fx.Node, name: str) -> None:
    """Name a node, with a number where another node has the name. Tried on 2.13."""
    node._rename(name)


def tables_of(graph: fx.Graph, nodes: Iterable[fx.Node]) -> dict[Any, list[fx.Node]]:
    """The rows of ``Graph.find_nodes`` in which the nodes stand. Tried on 2.13."""
    lookup = graph._find_nodes_lookup_table
    return {key: list(lookup.table[key]) for key in {lookup._key(node) for node in nodes}}


def relink(graph: fx.Graph, order: Sequence[fx.Node], gone: Collection[fx.Node], tables: Mapping[Any, Sequence[fx.Node]]) -> None:
    """Make ``order`` the nodes of a graph, without those that are ``gone``; ``tables`` as of ``tables_of``. It may be interrupted and
    called again. Tried on 2.13."""
    lookup, names = graph._find_nodes_lookup_table, graph._graph_namespace
    write = object.__setattr__  # Node's own takes the node out of a table first
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
