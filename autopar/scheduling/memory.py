"""Count the bytes that are alive in each line of a schedule.

A result is alive from the line in which its op begins to the line in which its last reader ends. An op that computes
ends in its own line, a collective in its last wait. A result that no op reads is alive to the end.
"""

from __future__ import annotations

from autopar.scheduling.lines import COMPUTE, START, Draft


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
    for i, users in enumerate(graph.users):
        if graph.memory[i]:
            change[begins[i]] += graph.memory[i]
            if users:
                change[max([ends[j] for j in users]) + 1] -= graph.memory[i]
    alive = most = 0
    for difference in change:
        alive += difference
        most = max(most, alive)
    return most
