"""Bound the seconds of every schedule from below: of any order, with any chunks and buckets, and with preemption.

    bound = max(critical path, per link: Jackson's preemptive bound, per stream: the bound with start-up costs, the
                bound of a host that computes itself)

A link carries the messages of one stream, or of several streams that share it. Messages that share a link take
together no less time than one after the other.

Jackson's bound is the makespan of one machine that may interrupt its jobs (Jackson 1955, Horn 1974). Job i is released
at head(i), takes p(i) seconds, and completes at least tail(i) before the makespan. The released job with the longest
tail always goes first. Heads and tails are the longest paths into and out of an op. Those of collectives are raised by
load: all computation that a collective depends on runs on one stream before it begins. So for each h, head >= h + the
seconds of its ancestors whose own heads are h or more. The same holds for tails and descendants.

A message pays the start-up cost θ once, however many collectives share it. Let it pay first and send then. So on the
machine a collective takes its seconds without θ, and is released θ later. Two collectives of which one depends on the
other never share a message; so those along one path through a link take all their seconds. The critical path counts
all seconds of each collective. ``startup_bound`` counts that many messages of one stream pay θ. Messages of several
streams may pay it at the same time. ``host_bound`` counts what starts take of a host that computes itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import numpy.typing

from autopar.scheduling.graph import Graph
from autopar.scheduling.host_bound import host_bound
from autopar.scheduling.startup_bound import startup_bound

TWICE = 2000  # ops up to which heads and tails are raised a second time, from those that were raised once


@dataclass(frozen=True)
class Bound:
    """The bound, and for each op the least seconds before its begin (``heads``) and after its end (``tails``)."""

    seconds: float
    heads: list[float]
    tails: list[float]


def bound(graph: Graph) -> Bound:
    """Return the bound. For 25,000 ops it takes less than a second."""
    turned = graph.reversed()
    heads, tails = heads_of(graph), heads_of(turned)
    path = max([h + s + t for h, s, t in zip(heads, graph.seconds, tails, strict=True)], default=0.0)
    return Bound(max(path, host_bound(graph), *_of_machines(graph, heads, tails)), heads, tails)


def heads_of(graph: Graph) -> list[float]:
    """Return op → the least seconds before its begin: the longest path in, raised by load."""
    heads = longest_paths(graph)
    for _ in range(2 if len(graph) <= TWICE else 1):
        heads = _raised(graph, heads)
    return heads


def longest_paths(graph: Graph) -> list[float]:
    """Return op → the longest path in. Linear."""
    heads, seconds = [0.0] * len(graph), graph.seconds
    for i in graph.order:
        end = heads[i] + seconds[i]
        for j in graph.readers[i]:
            if end > heads[j]:
                heads[j] = end
    return heads


def _raised(graph: Graph, heads: list[float]) -> list[float]:
    """Return heads with those of collectives raised by the load of their ancestors that compute.

    A set of ancestors is an integer with one bit for each op that computes, the op with the longest head first. The
    sums over all its prefixes come from a table: eight bits at once → their seconds.
    """
    seconds = graph.seconds
    loads = sorted((i for i in graph.computations if seconds[i]), key=lambda i: -heads[i])
    if not loads:
        return heads
    size = -(-len(loads) // 8)
    bit = {i: 1 << place for place, i in enumerate(loads)}
    table, earliest = _tables(loads, seconds, heads, size)
    rows = numpy.arange(size) * 256
    raised = [0.0] * len(graph)
    ancestors: list[int] = [0] * len(graph)
    unread = [len(readers) for readers in graph.readers]
    for i in graph.order:
        head, mine = heads[i], 0
        for j in graph.before[i]:
            mine |= ancestors[j]
            head = max(head, raised[j] + seconds[j])
            unread[j] -= 1
            if not unread[j]:
                ancestors[j] = 0
        if graph.stream[i] and mine:
            bits = numpy.frombuffer(mine.to_bytes(size, "little"), numpy.uint8)
            sums = table[rows + bits].cumsum()
            head = max(head, float((sums + earliest).max(where=sums > 0, initial=0.0)))
        raised[i] = head
        ancestors[i] = mine | bit.get(i, 0)
    return raised


def _tables(
    loads: list[int], seconds: list[float], heads: list[float], size: int
) -> tuple[numpy.typing.NDArray[numpy.float64], numpy.typing.NDArray[numpy.float64]]:
    """Return for each byte of a set: its 256 values → seconds; and the shortest head of its ops.

    The table is ``[256 · size]``, the heads are ``[size]``.
    """
    each = numpy.zeros(size * 8)
    each[: len(loads)] = [seconds[i] for i in loads]
    values = numpy.unpackbits(numpy.arange(256, dtype=numpy.uint8)[:, None], axis=1, bitorder="little")
    earliest = numpy.array([heads[loads[min(8 * k + 7, len(loads) - 1)]] for k in range(size)])
    return (each.reshape(size, 8) @ values.T.astype(float)).ravel(), earliest


def _of_machines(graph: Graph, heads: list[float], tails: list[float]) -> Iterator[float]:
    """Yield Jackson's bound of each stream, and of each link that several streams share."""
    for stream in range(len(graph.streams)):
        on_it = [own == stream for own in graph.stream]
        yield _of_machine(graph, on_it, heads, tails)
        yield _of_startups(graph, on_it, heads, tails)
    for link in set(graph.link) if graph.shares else ():
        yield _of_machine(graph, [graph.link[own] == link for own in graph.stream], heads, tails)


def _of_machine(graph: Graph, on_it: list[bool], heads: list[float], tails: list[float]) -> float:
    """Return Jackson's bound of some ops. ``on_it``: op → whether it is one of them."""
    own = [i for i in graph.order if on_it[i]]
    alone = own if not any(graph.fixed) else _along_path(graph, on_it)
    taken = set(alone)
    jobs = [
        (heads[i], graph.seconds[i], tails[i]) if i in taken or not graph.bytes[i]
        else (heads[i] + graph.fixed[i], graph.flow[i], tails[i])
        for i in own
    ]  # fmt: skip
    return jackson(jobs)


def _of_startups(graph: Graph, on_it: list[bool], heads: list[float], tails: list[float]) -> float:
    """Return the bound of the collectives of a stream that counts start-up costs; 0 if there are none."""
    cut = [i for i in graph.order if on_it[i] and graph.bytes[i] and graph.fixed[i]]
    if not cut:
        return 0.0
    return startup_bound(
        [heads[i] for i in cut], [graph.flow[i] for i in cut], [tails[i] for i in cut],
        min(graph.fixed[i] for i in cut),
    )  # fmt: skip


def _along_path(graph: Graph, on_it: list[bool]) -> list[int]:
    """Return the collectives of a link along the path on which their start-up costs are most."""
    best, last = [0.0] * len(graph), [-1] * len(graph)  # with the op itself; the op before it on the path
    for i in graph.order:
        for j in graph.before[i]:
            if best[j] > best[i]:
                best[i], last[i] = best[j], j
        if on_it[i]:
            best[i] += graph.fixed[i]
    path, at = [], max(range(len(graph)), key=best.__getitem__, default=-1)
    while at >= 0:
        if on_it[at]:
            path.append(at)
        at = last[at]
    return path


def jackson(jobs: list[tuple[float, float, float]]) -> float:
    """Return the shortest makespan of one machine that may interrupt its jobs: (head, seconds, tail) each.

    The released job with the longest tail always runs (Jackson 1955, Horn 1974). n log n.
    """
    jobs = sorted(jobs)
    waiting: list[tuple[float, float]] = []  # - tail, seconds that are left
    now, longest, next_ = 0.0, 0.0, 0
    while waiting or next_ < len(jobs):
        if not waiting:
            now = max(now, jobs[next_][0])
        while next_ < len(jobs) and jobs[next_][0] <= now:
            _, seconds, tail = jobs[next_]
            heapq.heappush(waiting, (-tail, seconds))
            next_ += 1
        tail, left = waiting[0]
        arrival = jobs[next_][0] if next_ < len(jobs) else float("inf")
        if now + left <= arrival:
            heapq.heappop(waiting)
            now += left
            longest = max(longest, now - tail)
        else:
            heapq.heapreplace(waiting, (tail, left - (arrival - now)))
            now = arrival
    return longest
