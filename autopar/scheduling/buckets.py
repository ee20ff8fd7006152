"""Put gradients in buckets in a fixed order, as DistributedDataParallel does: the first is small, the others large.

Collectives share buckets if the next one of their stream and kind is produced before they are first read (Li et al.,
PyTorch Distributed, VLDB 2020). This holds for gradients, and not for the all-reduces of tensor parallelism. The others
start where they stand in the program. Collectives that need no computation, such as the gathers of ZeRO 3, run one
ahead: each starts where the one before it is first read (Zhao et al., PyTorch FSDP, VLDB 2023).
"""

from __future__ import annotations

from autopar.scheduling.graph import Graph
from autopar.scheduling.lines import Draft

MIB = 2**20
FIRST, OTHERS = MIB, 25 * MIB  # bytes


def late(graph: Graph) -> set[int]:
    """Return the collectives that share buckets."""
    last: dict[int, int] = {}  # kind → the latest of its collectives
    found = set()
    for i in graph.collectives:
        if not graph.bytes[i] or not graph.before[i]:
            continue
        before = last.get(graph.kind[i])
        if before is not None and graph.position[i] < graph.first_reader[before]:
            found |= {before, i}
        last[graph.kind[i]] = i
    return found


def fifo(graph: Graph) -> Draft:
    """Return the ops in order, with gradients in buckets in the order in which they are computed."""
    return _Buckets(graph, {}).run()


def reverse(graph: Graph) -> Draft:
    """Return the ops in order, with gradients in buckets in the reverse order of their parameters.

    Parameters have the order in which their gradients are first read, which is that of the next forward. A bucket
    starts after the ones before it, when its last gradient is there.
    """
    gradients = sorted(late(graph), key=lambda i: (-graph.first_reader[i], graph.position[i]))
    buckets: dict[int, list[list[int]]] = {}  # kind → its buckets
    filled: dict[int, int] = {}
    for i in gradients:
        of_kind = buckets.setdefault(graph.kind[i], [])
        if not of_kind or filled[graph.kind[i]] >= (FIRST if len(of_kind) == 1 else OTHERS):
            of_kind.append([])
            filled[graph.kind[i]] = 0
        of_kind[-1].append(i)
        filled[graph.kind[i]] += graph.bytes[i]
    return _Buckets(graph, buckets).run()


class _Buckets:
    """Walks over the ops in order, and starts buckets and other collectives where they are due.

    Attributes:
        planned: kind → its buckets, in the order in which they start. Where this is empty, a bucket takes the gradients
            in the order in which they are computed, and starts when it is full.
    """

    def __init__(self, graph: Graph, planned: dict[int, list[list[int]]]) -> None:
        self.graph, self.planned, self.draft = graph, planned, Draft(graph)
        self.shared = late(graph)
        self.next = _one_ahead(graph)
        self.held_back = set(self.next.values())
        self.open: dict[int, list[int]] = {}  # kind → collectives that can start, and have not
        self.filled: dict[int, int] = {}
        self.limit: dict[int, int] = {}
        self.started: set[int] = set()

    def run(self) -> Draft:
        for i in self.graph.order:
            for j in self.graph.before[i]:
                self.due(j)
            if not self.graph.stream[i]:
                self.draft.compute(i)
            elif i in self.shared:
                self.add(i)
            elif i not in self.held_back:
                self.start([i])
        for i in self.graph.collectives:
            self.due(i)
        return self.draft.finished()

    def start(self, members: list[int]) -> None:
        members = [i for i in members if i not in self.started]
        self.started.update(members)
        if members:
            self.draft.start([self.graph.whole(i) for i in members])

    def due(self, i: int) -> None:
        """Start a collective that is read now, and the one that runs ahead of it."""
        if self.graph.stream[i] and i not in self.started:
            self.start(self.open.pop(self.graph.kind[i]) if i in self.shared else [i])
        if i in self.next:
            self.start([self.next[i]])

    def add(self, i: int) -> None:
        kind = self.graph.kind[i]
        waiting = self.open.setdefault(kind, [])
        waiting.append(i)
        if self.planned:
            buckets = self.planned[kind]
            while buckets and set(buckets[0]) <= set(waiting):
                bucket = buckets.pop(0)
                self.open[kind] = waiting = [j for j in waiting if j not in bucket]
                self.start(bucket)
            return
        self.filled[kind] = self.filled.get(kind, 0) + self.graph.bytes[i]
        if self.filled[kind] >= self.limit.get(kind, FIRST):
            self.limit[kind], self.filled[kind] = OTHERS, 0
            self.start(self.open.pop(kind))


def _one_ahead(graph: Graph) -> dict[int, int]:
    """Map each collective that needs no computation to the next of its stream and kind, by the places of readers."""
    pairs: dict[int, int] = {}
    last: dict[int, int] = {}
    for i in sorted(graph.collectives, key=lambda i: (graph.first_reader[i], graph.position[i])):
        if not graph.before[i]:
            if graph.kind[i] in last:
                pairs[last[graph.kind[i]]] = i
            last[graph.kind[i]] = i
    return pairs
