"""Fuse consecutive messages of a stream into one, which pays the start-up cost once, where nothing becomes late.

The latest end of a message is the last moment at which it may end without a longer makespan. Two messages are fused if
the fused one ends before the latest ends of both. That moves later messages forward, so repeating it may fuse more.
"""

from __future__ import annotations

from autopar.scheduling.lines import COMPUTE, START, WAIT, Draft
from autopar.scheduling.simulation import Times

ROUNDING = 1e-12  # of the makespan: sums of floats are not exact


def latest_ends(draft: Draft, times: Times) -> list[float]:
    """Return the latest end of each message, in seconds. Linear."""
    graph, now = draft.graph, times.makespan
    ends, needed = [now] * len(draft.messages), [now] * len(graph)
    free = [now] * len(graph.streams)
    for kind, at in reversed(draft.lines):
        if kind == COMPUTE:
            now = min(now, needed[at]) - graph.seconds[at]
        elif kind == WAIT:
            ends[at] = min(ends[at], now)
        else:
            parts = draft.messages[at]
            stream = graph.stream[parts[0][0]]
            ends[at] = min(ends[at], free[stream], *(needed[i] for i, *_ in parts))
            free[stream] = begin = ends[at] - graph.message_seconds(parts)
            for i, *_ in parts:
                for j in graph.before[i]:
                    needed[j] = min(needed[j], begin)
    return ends


def fused(draft: Draft, times: Times) -> Draft:
    """Return the lines with consecutive messages of one kind fused, where that makes nothing late."""
    graph, latest = draft.graph, latest_ends(draft, times)
    ended = [end for _, end in times.compute]
    slack = ROUNDING * times.makespan
    waits: dict[int, int] = {}
    starts: dict[int, int] = {}
    for place, (kind, at) in enumerate(draft.lines):
        if kind != COMPUTE:
            (waits if kind == WAIT else starts)[at] = place
        if kind == START:
            for i, *_ in draft.messages[at]:
                ended[i] = max(ended[i], times.messages[at][1])
    ready = [max([ended[j] for i, *_ in parts for j in graph.before[i]], default=0.0) for parts in draft.messages]
    groups: dict[int, list[int]] = {}  # last message of a group → all messages that are fused with it
    for queue in draft.of_stream():
        free, open_ = 0.0, list[int]()
        for message in queue:
            grown = [*open_, message]
            is_one_kind = len({graph.kind[draft.messages[m][0][0]] for m in grown}) == 1
            may_share = is_one_kind and all(graph.bytes[draft.messages[m][0][0]] for m in grown)
            if open_ and may_share and all(waits[m] > starts[message] for m in open_):
                begin = max(free, *(ready[m] for m in grown))
                end = begin + graph.message_seconds([part for m in grown for part in draft.messages[m]])
                if end <= min(latest[m] for m in grown) + slack:
                    open_ = grown
                    continue
            if open_:
                groups[open_[-1]] = open_
                free = max(free, *(ready[m] for m in open_)) + graph.message_seconds(
                    [part for m in open_ for part in draft.messages[m]]
                )
            open_ = [message]
        if open_:
            groups[open_[-1]] = open_
    return _with_groups(draft, groups, waits)


def _with_groups(draft: Draft, groups: dict[int, list[int]], waits: dict[int, int]) -> Draft:
    """Return the lines with each group as one message, with the start of the last member and the first of the waits."""
    new, number = Draft(draft.graph), {}
    first_wait = {min(waits[m] for m in members): last for last, members in groups.items()}
    for place, (kind, at) in enumerate(draft.lines):
        if kind == COMPUTE:
            new.lines.append((kind, at))
        elif kind == START and at in groups:
            number[at] = len(new.messages)
            parts = sorted(part for m in groups[at] for part in draft.messages[m])
            new.messages.append(_whole_ranges(parts))
            new.lines.append((kind, number[at]))
        elif kind == WAIT and place in first_wait:
            new.lines.append((kind, number[first_wait[place]]))
    return new


def _whole_ranges(parts: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return the parts with adjacent ranges of one op merged."""
    merged: list[tuple[int, int, int]] = []
    for i, begin, end in parts:
        if merged and merged[-1][0] == i and merged[-1][2] == begin:
            merged[-1] = i, merged[-1][1], end
        else:
            merged.append((i, begin, end))
    return merged
