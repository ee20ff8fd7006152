"""Put late collectives on a second stream over the same ranks, so that urgent ones need not wait for their end.

    reduce scatter of 4 ━━━━━━━━  gather of 1     one stream: the gather waits, and ends after 5
    reduce scatter of 4 ══════════                two: they share the link,
    gather of 1         ══                        and the gather ends after 2

A collective is late if its tail is short, or its slack is large: the seconds between its head and the begin at which it
would lengthen the bound. Both streams share a link, so no message moves faster. Cutting long messages has the same
effect, but costs a start-up for each chunk, and some collectives cannot be cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from autopar.scheduling.bounds import Bound
from autopar.scheduling.graph import Graph
from autopar.scheduling.op import Op

WORTH = 0.01  # of the makespan: a smaller gain is not worth another process group
TAILS = (0.01, 0.1, 0.5)  # of the bound: a collective with a shorter tail is late
SLACKS = (0.5, 0.25, 0.1)  # of the bound: a collective with more slack is late


def on_late_streams(ops: Sequence[Op], late: Collection[str]) -> list[Op]:
    """Return the ops with some collectives on the late stream of their own stream, and on its link."""
    return [
        replace(op, stream=late_stream(op.stream), link=op.link or op.stream) if op.name in late else op for op in ops
    ]


def late_stream(stream: str) -> str:
    """Return the name of the late stream beside a stream."""
    return f"{stream} (late)"


def late_ones(graph: Graph) -> frozenset[str]:
    """Return the collectives that are on late streams."""
    return frozenset(op.name for op in graph.ops if op.link and op.stream == late_stream(op.link))


def splits(graph: Graph, bound: Bound) -> Iterator[frozenset[str]]:
    """Yield choices of late collectives, each once; a choice leaves at least one collective on each stream."""
    slack = [
        bound.seconds - head - seconds - tail
        for head, seconds, tail in zip(bound.heads, graph.seconds, bound.tails, strict=True)
    ]
    chosen = [
        *({i for i in graph.collectives if bound.tails[i] <= share * bound.seconds} for share in TAILS),
        *({i for i in graph.collectives if slack[i] >= share * bound.seconds} for share in SLACKS),
    ]
    known = {frozenset[str]()}
    for late in chosen:
        urgent = {graph.stream[i] for i in graph.collectives if i not in late}
        names = frozenset(graph.ops[i].name for i in late if graph.stream[i] in urgent)
        if names not in known:
            known.add(names)
            yield names
