"""Bound the seconds of every schedule from below where the host computes itself, and each start takes time of it.

    bound = seconds of all computation + messages · seconds of a start
    messages >= sum over kinds: most collectives of that kind along one path

A message has collectives of one kind. Two of which one needs the other never share one, and one of 0 bytes shares none.
"""

from __future__ import annotations

from autopar.scheduling.graph import Graph


def host_bound(graph: Graph) -> float:
    """Return the bound; 0 where starts take no time of the host. Linear for a fixed number of kinds."""
    if not graph.start_seconds:
        return 0.0
    computed = sum(graph.seconds[i] for i in graph.computations)
    return computed + fewest_messages(graph) * graph.start_seconds


def fewest_messages(graph: Graph) -> int:
    """Return a number of messages that no schedule is below."""
    whole = sum(not graph.bytes[i] for i in graph.collectives)
    shared = [i for i in graph.collectives if graph.bytes[i]]
    return whole + sum(_longest_chain(graph, kind) for kind in {graph.kind[i] for i in shared})


def _longest_chain(graph: Graph, kind: int) -> int:
    """Return the most collectives of a kind, with bytes, along one path."""
    chain = [0] * len(graph)  # up to the op, with it
    for i in graph.order:
        chain[i] = max([chain[j] for j in graph.before[i]], default=0)
        chain[i] += graph.kind[i] == kind and graph.bytes[i] > 0
    return max(chain)
