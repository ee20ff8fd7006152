"""Order ops as a host dispatches them, without times: always the ready op with the smallest key.

An op is ready when all ops that it reads have been dispatched. Starting a collective never blocks. An op that reads a
collective blocks, because it waits, unless an earlier op has waited for the same collective. The policies
``"communication-first"`` and ``"compute-first"`` differ in whether ops that block go first (PaddlePaddle #47471).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from autopar.scheduling.graph import Graph
from autopar.scheduling.lines import Draft


def in_order(graph: Graph) -> Draft:
    """Return the lines in the order of the ops."""
    draft = Draft(graph)
    for i in graph.order:
        draft.issue(i)
    return draft.finished()


def just_in_time(graph: Graph) -> Draft:
    """Return the lines in the order of the ops, with each collective right before its first reader: few bytes are
    alive."""
    draft, started = Draft(graph), set[int]()

    def start(i: int) -> None:
        pending = [i]
        while pending:  # a collective may read another
            at = pending[-1]
            unread = [j for j in graph.before[at] if graph.stream[j] and j not in started]
            if unread:
                pending += unread
            else:
                pending.pop()
                if at not in started:
                    started.add(at)
                    draft.start([graph.whole(at)])

    for i in graph.computations:
        for j in graph.before[i]:
            if graph.stream[j] and j not in started:
                start(j)
        draft.compute(i)
    for i in graph.collectives:
        if i not in started:
            start(i)
    return draft.finished()


def two_levels(graph: Graph, blocking_first: bool, numbers: Sequence[int] | None = None) -> Draft:
    """Return the lines by level, and within a level in the order of the ops.

    Args:
        graph: the ops.
        blocking_first: whether ops that wait go before ops that do not. Starts go before both.
        numbers: op → a priority that counts more than the level; smaller first.
    """
    return _Dispatch(graph, blocking_first, numbers or [0] * len(graph)).run()


class _Dispatch:
    """Dispatches the ready op with the smallest key until all ops are dispatched."""

    def __init__(self, graph: Graph, blocking_first: bool, numbers: Sequence[int]) -> None:
        self.graph, self.numbers = graph, numbers
        self.levels = {False: 2, True: 1} if blocking_first else {False: 1, True: 2}
        self.missing = [len(before) for before in graph.before]
        self.unwaited = [0] * len(graph)  # of what an op reads: collectives that nothing has waited for
        self.waited: set[int] = set()
        self.ready: list[tuple[int, int, int, int]] = []  # number, level, position, op

    def push(self, i: int) -> None:
        level = 0 if self.graph.stream[i] else self.levels[self.unwaited[i] > 0]
        heapq.heappush(self.ready, (self.numbers[i], level, self.graph.position[i], i))

    def run(self) -> Draft:
        graph, draft = self.graph, Draft(self.graph)
        dispatched = [False] * len(graph)
        for i in graph.order:
            self.unwaited[i] = sum(graph.stream[j] > 0 for j in graph.before[i])
            if not self.missing[i]:
                self.push(i)
        while self.ready:
            *_, i = heapq.heappop(self.ready)
            if dispatched[i]:  # it was pushed again, when it no longer blocked
                continue
            dispatched[i] = True
            for j in graph.before[i]:
                self.wait(j)
            draft.issue(i)
            for j in graph.readers[i]:
                self.missing[j] -= 1
                if not self.missing[j]:
                    self.push(j)
        return draft.finished()

    def wait(self, i: int) -> None:
        """Wait for a collective: its other readers no longer block on it."""
        if not self.graph.stream[i] or i in self.waited:
            return
        self.waited.add(i)
        for j in self.graph.readers[i]:
            self.unwaited[j] -= 1
            if not self.missing[j] and not self.unwaited[j] and not self.graph.stream[j]:
                self.push(j)
