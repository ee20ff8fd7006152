"""Count the bytes that are alive in each line of a schedule.

A result is alive from the line in which its op begins to the line in which its last reader ends. An op that computes
ends in its own line, a collective in its last wait. A result that no op reads is alive to the end. The results of a
bucket of all-reduces are views of one buffer, which is alive as long as any of them.
"""

from __future__ import annotations

from autopar.scheduling.lines import COMPUTE, START, Draft
from autopar.scheduling.op import Op


def peak(draft: Draft) -> int:
    """Return the most bytes alive in any line. Linear."""
    graph = draft.graph
    if not any(graph.memory):
        return 0
    begins, ends = [-1] * len(graph), [0] * len(graph)
    for place, (kind, at) in enumerate(draft.lines):
        for i in (at,) if kind == COMPUTE else [part[0] for part in draft.messages[at]]:
            if begins[i] < 0 and kind in (COMPUTE, START):
                begins[i] = place
            ends[i] = place
    change = [0] * (len(draft.lines) + 1)
    last = [max([ends[j] for j in users], default=len(draft.lines)) for users in graph.users]
    for parts in draft.messages:
        if len(parts) > 1 and _is_all_reduce(graph.ops[parts[0][0]]):
            latest = max(last[i] for i, _, _ in parts)
            for i, begin, end in parts:
                if graph.memory[i]:
                    last[i] = latest
                elif last[i] < latest:  # reduced in place: until its own last reader its operand stands for it
                    change[last[i] + 1] += end - begin
                    if latest < len(draft.lines):
                        change[latest + 1] -= end - begin
    for i, bytes in enumerate(graph.memory):
        if bytes:
            change[begins[i]] += bytes
            if last[i] < len(draft.lines):
                change[last[i] + 1] -= bytes
    alive = most = 0
    for difference in change:
        alive += difference
        most = max(most, alive)
    return most


def _is_all_reduce(op: Op) -> bool:
    """Return whether an op of a program is an all-reduce: its kind begins with the name of the transfer."""
    return isinstance(op.kind, tuple) and op.kind[:1] == ("all_reduce",)
