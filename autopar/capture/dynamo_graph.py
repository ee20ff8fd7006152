"""Give a graph of torch.compile the names of the model, and make the buffers that it takes buffers of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.capture.exported import tell_origins

PART = re.compile(r"_(modules|parameters|buffers)\['([^']+)'\]")


@dataclass(frozen=True)
class NamedGraph:
    """A graph that takes parameters and inputs, and keeps buffers.

    Attributes:
        module: the graph.
        taken: the positions of the arguments that it takes.
        names: argument that it takes → its name in the model: ``up_weight`` → ``up.weight``; an input has its own.
        parameters: the arguments that are parameters.
        buffers: position of an argument → the buffer of the graph in its place.
        numbers: positions of tensors that are read as numbers: torch.compile makes one of a float that changes.
    """

    module: fx.GraphModule
    taken: tuple[int, ...]
    names: dict[str, str]
    parameters: frozenset[str]
    buffers: dict[int, str]
    numbers: frozenset[int]

    def arguments(self, given: Sequence[Any]) -> list[Any]:
        """Return the arguments that the graph takes of those that torch.compile gives."""
        return [given[k].item() if k in self.numbers else given[k] for k in self.taken]


def named_graph(graph: fx.GraphModule, arguments: Sequence[Any]) -> NamedGraph:
    """Return a copy of a graph of torch.compile with the model's names.

    Args:
        arguments: those of the call that is compiled.
    """
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    graph = fx.GraphModule(graph, copied)
    taken: list[int] = []
    names: dict[str, str] = {}
    parameters: set[str] = set()
    buffers: dict[int, str] = {}
    used: set[str] = set()
    numbers: set[int] = set()
    for position, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        kind, path = _source(node)
        name = _unused(re.sub(r"\W+", "_", path).strip("_") or "x", used)
        if kind == "buffers" and isinstance(tensor := arguments[position], torch.Tensor):
            graph.register_buffer(name, torch.empty_like(tensor), persistent=False)
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.get_attr(name))
            graph.graph.erase_node(node)
            buffers[position] = name
            continue
        node.target, node.type = name, None
        if node.users and all(user.op == "call_method" and user.target == "item" for user in node.users):
            numbers.add(position)
            for user in list(node.users):
                user.replace_all_uses_with(node)
                graph.graph.erase_node(user)
        taken.append(position)
        names[name] = path if kind else name
        if kind == "parameters":
            parameters.add(name)
    tell_origins(graph)
    graph.recompile()
    return NamedGraph(graph, tuple(taken), names, frozenset(parameters), buffers, frozenset(numbers))


def _source(node: fx.Node) -> tuple[str, str]:
    """Return where an argument comes from: ``parameters``, ``buffers`` or ``""``, and its name."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    text = str(getattr(source, "name", node.target))
    parts = PART.findall(text)
    if parts and parts[-1][0] != "modules":
        return parts[-1][0], ".".join(name for _, name in parts)
    return "", re.sub(r"^[LG]\['(\w+)'\]", r"\1", text)


def _unused(name: str, used: set[str]) -> str:
    """Return the name, with a number behind it if it is used already."""
    free, count = name if name.isidentifier() else f"x_{name}", 1
    while free in used:
        free, count = f"{name}_{count}", count + 1
    used.add(free)
    return free
