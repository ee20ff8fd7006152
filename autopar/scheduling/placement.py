"""Move the starts of a draft, and join chunks, without changing the order of any stream.

* Where a CPU computes, each start is moved to the earliest line: right after the op that computes its operand.
* The gathers of ZeRO can start at once, but then their results fill the memory. They start by deadline: at the latest
  begin at which they still end in time, minus their own seconds, because durations are estimates.
* Consecutive chunks of one collective on a stream are joined to one message: it ends no later, and pays one start-up
  cost less.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from autopar.scheduling.lines import COMPUTE, START, WAIT, Draft
from autopar.scheduling.simulation import Times


def joined(draft: Draft) -> Draft:
    """Return the lines with consecutive chunks of a collective joined to one message. Linear."""
    into: dict[int, int] = {}
    messages = list(draft.messages)
    for queue in draft.of_stream():
        for before, message in pairwise(queue):
            first = into.get(before, before)
            if len(messages[first]) == len(messages[message]) == 1:
                (i, begin, end), (j, then, last) = messages[first][0], messages[message][0]
                if i == j and end == then:
                    into[message] = first
                    messages[first] = [(i, begin, last)]
    if not into:
        return draft
    new = Draft(draft.graph)
    number = {message: k for k, message in enumerate(m for m in range(len(messages)) if m not in into)}
    new.messages = [messages[message] for message in number]
    last_wait = {into.get(at, at): place for place, (kind, at) in enumerate(draft.lines) if kind == WAIT}
    for place, (kind, at) in enumerate(draft.lines):
        if kind == COMPUTE:
            new.lines.append((kind, at))
        elif kind == START:
            if at not in into:
                new.lines.append((kind, number[at]))
        elif last_wait[into.get(at, at)] == place:
            new.lines.append((kind, number[into.get(at, at)]))
    return new


def hoisted(draft: Draft) -> Draft:
    """Return the lines with each start right after its operands, and after the start before it on its stream.

    Linear.
    """
    graph = draft.graph
    places, last, kept = [0] * len(draft.messages), [0] * len(graph.streams), 0
    done = [0] * len(graph)  # op → the number of lines, starts not counted, after which it has ended
    for kind, at in draft.lines:
        if kind == START:
            parts = draft.messages[at]
            stream = graph.stream[parts[0][0]]
            places[at] = last[stream] = max(last[stream], *(done[j] for i, *_ in parts for j in graph.before[i]), 0)
            continue
        kept += 1
        for i in (at,) if kind == COMPUTE else [part[0] for part in draft.messages[at]]:
            done[i] = kept
    return _placed(draft, places)


def by_deadline(draft: Draft, times: Times, early: Sequence[bool]) -> Draft:
    """Return the lines with the starts of some collectives moved to their deadlines.

    Args:
        draft: the lines.
        times: the times of the lines.
        early: op → whether it is such a collective.
    """
    graph = draft.graph
    latest = [times.makespan] * len(draft.messages)  # the latest begin of a message
    reads: list[float] = [times.makespan] * len(graph)  # op → the latest begin of a message that sends its result
    free, now, places, kept = [times.makespan] * len(graph.streams), times.makespan, [0] * len(draft.messages), 0
    for kind, at in reversed(draft.lines):
        if kind == COMPUTE:
            now = times.compute[at][0]
        elif kind == WAIT:
            latest[at] = now
        else:
            parts = draft.messages[at]
            stream = graph.stream[parts[0][0]]
            end = min(latest[at], free[stream], *(reads[i] for i, *_ in parts))
            latest[at] = free[stream] = end - graph.message_seconds(parts)
            for i, *_ in parts:
                for j in graph.before[i]:
                    reads[j] = min(reads[j], latest[at])
    waited = [len(draft.lines)] * len(draft.messages)  # message → the number of its wait, starts not counted
    for kind, at in draft.lines:
        if kind == START:
            places[at] = kept
        else:
            if kind == WAIT:
                waited[at] = kept
            kept += 1
    begins, now = [0.0] * kept, times.makespan  # of all lines but starts; a wait begins with the op after it
    for place, (kind, at) in enumerate(reversed([line for line in draft.lines if line[0] != START])):
        begins[-1 - place] = now = times.compute[at][0] if kind == COMPUTE else now
    for queue in draft.of_stream():
        following = kept
        for message in reversed(queue):
            parts = draft.messages[message]
            if all(early[i] for i, *_ in parts):
                due = latest[message] - graph.message_seconds(parts)
                places[message] = max(places[message], min(bisect_right(begins, due) - 1, following, waited[message]))
            following = places[message]
    return _placed(draft, places)


def _placed(draft: Draft, places: Sequence[int]) -> Draft:
    """Return the lines with each start moved. ``places``: message → the line before which it starts, starts not
    counted."""
    new = Draft(draft.graph)
    new.messages = draft.messages
    starts: dict[int, list[int]] = {}
    for kind, at in draft.lines:
        if kind == START:
            starts.setdefault(places[at], []).append(at)
    others = [line for line in draft.lines if line[0] != START]
    for place in range(len(others) + 1):
        new.lines += [(START, message) for message in starts.get(place, ())]
        new.lines += others[place : place + 1]
    return new
