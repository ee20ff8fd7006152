"""Schedule by longest tail: the op whose tail is longest goes first. The default policy.

Keys and rules are tried, a number of them that depends on the number of ops alone, and the shortest schedule is kept:

* keys: the longest path that follows an op; the same with tails raised by load; the order in which collectives are
  read; and the times of the best schedule so far, scheduled backwards and then forwards (forward-backward improvement,
  Li and Willis 1992);
* sizes: chunks and buckets near √(θBS), where θ is the start-up cost of a message, B the bandwidth and S the bytes of
  a kind; and a message is cut where a more urgent one can start;
* patience: whether computation waits for an urgent op that is ready soon, instead of beginning a long one.

The result depends on the input alone. ``decide`` compares it with other policies, and keeps the shortest.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

from autopar.scheduling.bounds import Bound, longest_paths
from autopar.scheduling.graph import Graph
from autopar.scheduling.lines import COMPUTE, START, WAIT, Draft
from autopar.scheduling.list_scheduling import Keys, OutOfMemory, Rule, arrange, layer_keys, peak
from autopar.scheduling.simulation import Times, times

# -- placement ---------------------------------------------------------------------------------------------------------
#
# Move the starts of a draft, and join chunks, without changing the order of any stream.
#
# * Where a CPU computes, each start is moved to the earliest line: right after the op that computes its operand.
# * The gathers of ZeRO can start at once, but then their results fill the memory. They start by deadline: at the latest
#   begin at which they still end in time, minus their own seconds, because durations are estimates.
# * Consecutive chunks of one collective on a stream are joined to one message: it ends no later, and pays one start-up
#   cost less.


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


# -- fusing ------------------------------------------------------------------------------------------------------------
#
# Fuse consecutive messages of a stream into one, which pays the start-up cost once, where nothing becomes late.
#
# The latest end of a message is the last moment at which it may end without a longer makespan. Two messages are fused
# if the fused one ends before the latest ends of both. That moves later messages forward, so repeating it may fuse
# more.


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


# -- longest tail ------------------------------------------------------------------------------------------------------


BUDGET = 60_000  # ops that all tries together schedule
LEAST, MOST = 8, 160  # tries
PIECES = 8  # of a window; what does not fit is cut after one of them
NEAR = 0.05  # of the shortest: a draft that is so much longer may become the shortest when it is fused
CLOSE = 1e-9  # of the bound: a draft that is so near is optimal
PRECISE = 0.01  # of the bytes that an error names


class LongestTail:
    """Tries rules on one graph.

    Attributes:
        best: the shortest draft so far.
        seconds: its makespan.
        won: the keys and the rule that made it.
        left: how many tries are left.
    """

    def __init__(
        self,
        graph: Graph,
        bound: Bound,
        run: Callable[[Draft], tuple[Draft, Times]],
        numbers: Sequence[int] | None = None,
        memory: float = inf,
    ) -> None:
        """Prepare the tries.

        Args:
            graph, bound: the ops and their bound.
            run: returns a draft as it is issued, and its times.
            numbers: op → the user's priority, which counts more than the tail.
            memory: the most bytes that may be alive.
        """
        self.graph, self.bound, self.run, self.numbers, self.memory = graph, bound, run, numbers, memory
        self.sizes = sizes(graph)
        self.startup = max(graph.fixed, default=0.0) + graph.start_seconds
        self.best: Draft | None = None
        self.seconds = inf
        self.left = min(MOST, max(LEAST, BUDGET // max(1, len(graph))))
        self.won: tuple[Keys, Rule] | None = None
        self._known: dict[tuple[Any, ...], bool] = {}  # lines and messages → whether they fit into the memory
        self._tried: set[tuple[Any, ...]] = set()  # keys, and the effect of a rule
        self._largest, self._total = bytes_of_kinds(graph)

    @property
    def is_done(self) -> bool:
        return not self.left or self.seconds <= self.bound.seconds * (1 + CLOSE)

    def found(self) -> Draft | None:
        """Return the best draft of all tries; ``None`` if none fits into the memory."""
        first, *others = self.rules()
        begun = list(self.keys())
        for keys in begun:
            self.attempt(keys, first)
        self.improve()
        for rule in others:
            for keys in (*([self.won[0]] if self.won else []), *begun):
                self.attempt(keys, rule)
        self.improve()
        return self.best

    def keys(self) -> Iterable[Keys]:
        """Yield the keys that are tried first."""
        graph, turned = self.graph, self.graph.reversed()
        yield self.ordered([-tail for tail in self.bound.tails])
        yield self.ordered([-tail for tail in longest_paths(turned)])
        yield self.ordered(layer_keys(graph))
        back = joined(arrange(turned, [-head for head in self.bound.heads], self.base))
        yield self.ordered([-end for end in self.of_ops(back, times(back, "enqueue"))[1]])

    def rules(self) -> Iterable[Rule]:
        """Yield the rules, those that help most often first."""
        cut = Rule(cut=2 * self.startup)
        yield self.base
        yield replace(self.base, patience=0.5)
        yield replace(self.base, patience=0.2)
        yield replace(self.base, patience=1.0)
        if self.startup:
            yield cut
            yield replace(cut, patience=0.5)
        if self.startup:
            for factor in (1.0, 2.0, 0.5, 4.0, 1.4, 0.7, 8.0, 2.8):
                scaled = {kind: size * factor for kind, size in self.sizes.items()}
                piece = max(1, round(min(scaled.values(), default=0.0) / PIECES))
                yield Rule(chunk=scaled, window=scaled, piece=piece)
                yield replace(cut, window=scaled)
                yield Rule(chunk=scaled, window=scaled)

    @property
    def base(self) -> Rule:
        return Rule(cut=2 * self.startup, window=self.sizes if self.startup else 0)

    def ordered(self, keys: Sequence[float]) -> Keys:
        """Return keys in which the user's priorities count first."""
        return keys if self.numbers is None else list(zip(self.numbers, keys, strict=True))

    def attempt(self, keys: Keys, rule: Rule) -> None:
        """Make one draft, and keep it if it is the shortest."""
        if self.is_done:
            return
        self.left -= 1
        tried = tuple(keys), rule.effect(self._largest, self._total)
        if tried in self._tried:  # most sizes are above those of a small graph
            return
        self._tried.add(tried)
        for memory in dict.fromkeys((inf, self.memory)):
            try:
                draft = joined(arrange(self.graph, keys, rule, memory))
            except OutOfMemory:
                continue
            if self.keep(draft, keys, rule):
                return

    def keep(self, draft: Draft, keys: Keys, rule: Rule) -> bool:
        """Run a draft, fuse its messages, and keep it if it is the shortest. Return whether it fits into the memory."""
        written = tuple(draft.lines), tuple(map(tuple, draft.messages))
        if written in self._known:  # many rules make the same draft of a small graph
            return self._known[written]
        draft, found = self.run(draft)
        while self.startup and found.makespan < min(inf, self.seconds * (1 + NEAR)):
            fewer, then = self.run(fused(draft, found))
            if then.makespan >= found.makespan * (1 - CLOSE):
                break
            draft, found = fewer, then
        if found.makespan < self.seconds:
            self.best, self.seconds, self.won = draft, found.makespan, (keys, rule)
        self._known[written] = found.makespan < inf
        return self._known[written]

    def in_order(self) -> Iterator[Draft]:
        """Yield the drafts of the best rule in which ops compute in their order."""
        rule = self.base if self.won is None else self.won[1]
        for keys in (*([self.won[0]] if self.won else []), layer_keys(self.graph)):
            for memory in dict.fromkeys((inf, self.memory)):
                with contextlib.suppress(OutOfMemory):
                    draft = joined(arrange(self.graph, keys, replace(rule, patience=0, program_order=True), memory))
                    yield draft
                    issued, found = self.run(draft)
                    if self.startup and found.makespan < inf:
                        yield fused(issued, found)

    def improve(self) -> None:
        """Schedule backwards from the ends of the best schedule, and forwards again, while that helps."""
        turned = self.graph.reversed()
        while self.best is not None and self.won is not None and not self.is_done:
            before, rule = self.seconds, self.won[1]
            _, ends = self.of_ops(self.best, self.run(self.best)[1])
            back = joined(arrange(turned, self.ordered([-end for end in ends]), replace(rule, patience=0.0)))
            _, ends = self.of_ops(back, times(back, "enqueue"))
            self.attempt(self.ordered([-end for end in ends]), rule)
            if self.seconds >= before:
                return

    def of_ops(self, draft: Draft, times: Times) -> tuple[list[float], list[float]]:
        """Return when each op begins and ends, collectives too."""
        begins, ends = [begin for begin, _ in times.compute], [end for _, end in times.compute]
        for i in self.graph.collectives:
            begins[i] = inf
        for parts, (begin, end) in zip(draft.messages, times.messages, strict=True):
            for i, *_ in parts:
                begins[i], ends[i] = min(begins[i], begin), max(ends[i], end)
        return begins, ends


def bytes_of_kinds(graph: Graph) -> tuple[dict[int, int], dict[int, int]]:
    """Return kind → the bytes of its largest collective, and kind → those of all."""
    largest: dict[int, int] = {}
    total: dict[int, int] = {}
    for i in graph.collectives:
        kind, size = graph.kind[i], graph.bytes[i]
        largest[kind] = max(largest.get(kind, 0), size)
        total[kind] = total.get(kind, 0) + size
    return largest, total


def sizes(graph: Graph) -> dict[int, float]:
    """Return kind → √(θBS) in bytes: the size of messages at which start-up costs and waiting cost least together."""
    _, total = bytes_of_kinds(graph)
    flow: dict[int, float] = {}
    fixed: dict[int, float] = {}
    for i in graph.collectives:
        if graph.bytes[i]:
            kind = graph.kind[i]
            flow[kind] = flow.get(kind, 0.0) + graph.flow[i]
            fixed[kind] = max(fixed.get(kind, 0.0), graph.fixed[i] + graph.start_seconds)
    return {
        kind: max(1.0, math.sqrt(fixed[kind] * size / flow[kind] * size)) if flow[kind] else float(size)
        for kind, size in total.items()
        if size
    }


def least_need(graph: Graph, too_few: float, enough: float) -> float:
    """Return bytes that an order is known to need at most, for an error: between a limit that none was found for, and
    what some order needs. By bisection, to a hundredth."""
    most_urgent = layer_keys(graph)
    while enough - too_few > max(1.0, PRECISE * enough):
        limit = (too_few + enough) // 2
        try:
            enough = min(peak(joined(arrange(graph, most_urgent, Rule(), limit))), enough)
        except OutOfMemory:
            too_few = limit
    return enough
