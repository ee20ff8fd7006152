"""Fold a long chain of equal blocks to a short one, and carry its messages back to the long one.

The messages of the layers in the middle of a deep model hardly differ. So messages are passed on a chain of few blocks,
and all inner blocks of the long chain take those of the one in the middle. This is a reparametrisation as any other is,
so the bound that it proves holds for the long chain.

Three blocks of the run are kept: ``first a b c d last`` becomes ``first a b d last``, and c takes the messages of b.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autopar.search.factor_graph import Edge, FactorGraph
from autopar.search.message_passing import MessagePassing

KEPT = 4  # blocks of a run: two at the beginning, one in the middle, one at the end


class Run(NamedTuple):
    """Blocks that follow each other and are equal, also in their edges to each other and to what is outside.

    Attributes:
        blocks: the variables of each block, in order.
    """

    blocks: list[list[int]]


def runs(graph: FactorGraph, variables: Sequence[int], labels: Sequence[str]) -> list[Run]:
    """Return the runs of equal blocks, the longest first.

    Args:
        variables: those of the graph that count.
        labels: variable → the path of its block, as ``layers.3``, or "" outside of blocks.
    """
    chains: dict[str, dict[int, list[int]]] = {}
    for v in variables:
        head, _, number = labels[v].rpartition(".")
        if number.isdecimal():
            chains.setdefault(head, {}).setdefault(int(number), []).append(v)
    found = []
    for members in chains.values():
        blocks = [members[number] for number in sorted(members)]
        place = {v: (k, p) for k, block in enumerate(_without_far(graph, blocks)) for p, v in enumerate(block)}
        blocks = [[v for v in block if v in place] for block in blocks]
        edges: dict[int, dict[object, tuple[int, ...]]] = {k: {} for k in range(len(blocks))}
        for (i, j), edge in graph.edges.items():
            ids = tuple(map(id, edge))
            (k, p), (m, q) = place.get(i, (-1, i)), place.get(j, (-1, j))
            if k >= 0:
                edges[k][p, m - k if m >= 0 else "out", q] = ids
            if m >= 0 and m != k:
                edges[m]["in", k - m if k >= 0 else "out", p, q] = ids
        signs = [
            (tuple(id(graph.costs[v]) for v in block), frozenset(edges[k].items())) for k, block in enumerate(blocks)
        ]
        begin = 0
        for k in range(1, len(blocks) + 1):
            if k == len(blocks) or signs[k] != signs[begin]:
                if k - begin > KEPT:
                    found.append(Run(blocks[begin:k]))
                begin = k
    return sorted(found, key=lambda run: -len(run.blocks))


def _without_far(graph: FactorGraph, blocks: list[list[int]]) -> list[list[int]]:
    """Leave out the variables that are beside a block which is neither their own nor the next or the previous one."""
    of = {v: k for k, block in enumerate(blocks) for v in block}
    far = set()
    for i, j in graph.edges:
        if i in of and j in of and abs(of[i] - of[j]) > 1:
            far |= {i, j}  # a value that many blocks read is one end of such an edge
    # the readers are beside the value of another block too: only the ends with several such edges are left out
    count = {v: 0 for v in far}
    for i, j in graph.edges:
        if i in of and j in of and abs(of[i] - of[j]) > 1:
            count[i] += 1
            count[j] += 1
    dropped: set[int] = set()
    for i, j in graph.edges:
        if i in of and j in of and abs(of[i] - of[j]) > 1 and not dropped & {i, j}:
            dropped.add(i if count[i] >= count[j] else j)
    return [[v for v in block if v not in dropped] for block in blocks]


class Folded:
    """A graph whose longest run of blocks is shortened.

    Attributes:
        graph: the short one.
        variables: variable of the short graph → variable of the long one.
    """

    def __init__(self, graph: FactorGraph, left: Sequence[int], run: Run) -> None:
        self.long, self.left, self.blocks = graph, list(left), run.blocks
        blocks = run.blocks
        self.kept = [blocks[0], blocks[1], blocks[2], blocks[-1]]
        dropped = {v for block in blocks[3:-1] for v in block}
        self.variables = [v for v in left if v not in dropped]
        self._number = {v: k for k, v in enumerate(self.variables)}
        self._place = {v: (k, p) for k, block in enumerate(blocks) for p, v in enumerate(block)}
        self.graph = FactorGraph(graph.intern)
        for v in self.variables:
            self.graph.add_variable(graph.names[v], graph.costs[v])
        before, after = set(blocks[2]), dict(zip(blocks[3], blocks[-1], strict=True))
        for (i, j), edge in graph.edges.items():
            if i in before or j in before:  # the last block follows the third
                i, j = after.get(i, i), after.get(j, j)
            if i in self._number and j in self._number:
                self.graph.add_edge(self._number[i], self._number[j], *edge)

    def unfolded(self, passing: MessagePassing) -> FactorGraph:
        """Return the long graph, reparametrised by the messages of the short one.

        Its variables are ``left``, in order.
        """
        given = {}
        for link in passing.links:
            i, j = passing.variables[link.lower], passing.variables[link.upper]
            given[i, j], given[j, i] = link.to_lower, link.to_upper
        ids = {v: k for k, v in enumerate(self.left)}
        costs: dict[int, np.ndarray] = {}
        groups: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        result, edges = FactorGraph(self.long.intern), []
        for v in self.left:
            costs[v] = self.long.costs[v].copy()
        for (i, j), edge in self.long.edges.items():
            mine, theirs = given[self._pair(i, j)], given[self._pair(j, i)]
            costs[i] += mine[edge.left]
            costs[j] += theirs[edge.right]
            key = (id(edge.table), id(mine), id(theirs))
            if key not in groups:
                groups[key] = (self.long.intern(edge.table - mine[:, None] - theirs[None, :]), mine, theirs)
            edges.append((ids[i], ids[j], Edge(edge.left, edge.right, groups[key][0])))
        for v in self.left:
            result.add_variable(self.long.names[v], costs[v])
        for i, j, edge in edges:
            result.edges[i, j] = edge
        return result

    def _pair(self, end: int, other: int) -> tuple[int, int]:
        """Return the edge of the short graph whose message an end takes: that end, and the other one."""
        (k, p), (m, q) = self._place.get(end, (None, 0)), self._place.get(other, (None, 0))
        kept = None if k is None else self._kept(k)
        if kept is not None:
            end = self.kept[kept][p]
        if m is not None:
            beside = self._kept(m) if kept is None or k is None else kept + m - k
            other = self.kept[beside][q]
        return self._number[end], self._number[other]

    def _kept(self, block: int) -> int:
        """Return the kept block whose messages a block takes: the first, the second, or the last."""
        return 0 if block == 0 else 3 if block == len(self.blocks) - 1 else 1

    def extended(self, states: Mapping[int, int]) -> dict[int, int]:
        """Return the states of the long graph from those of the short one."""
        full = {}
        for v in self.left:
            k, p = self._place.get(v, (None, 0))
            full[v] = states[self._number[v if k is None else self.kept[self._kept(k)][p]]]
        return full
