"""Schedule by list scheduling: whenever a stream is free, it takes the ready op with the smallest key.

A collective that is taken is sent whole, as a chunk, or in a bucket with others, as a ``Rule`` says. Times are those of
``"enqueue"``. The result is a sequence of lines; nothing is decided while a step runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from autopar.scheduling.graph import Graph, PartOf
from autopar.scheduling.lines import COMPUTE, START, Draft
from autopar.scheduling.op import Op

# -- rule --------------------------------------------------------------------------------------------------------------
#
# Define the rules by which list scheduling takes what is ready: how messages are cut and filled, and who waits.


Sizes = float | Mapping[int, float]  # bytes: for all kinds of collectives, or kind → bytes


@dataclass(frozen=True)
class Rule:
    """How a stream takes what is ready.

    Attributes:
        chunk: the most bytes of one collective in a message.
        window: a message is filled up to these bytes, with further collectives of its kind.
        piece: bytes; what does not fit into a window whole is cut after a multiple of them. 0: it is left out.
        credit: bytes that may be started and not yet done; a message that is alone may have more.
        cut: seconds; a message is cut where a more urgent one can start, if at least so many are left.
        patience: computation waits for a more urgent op that is ready within this share of the seconds of the op that
            is ready now.
        program_order: whether ops compute in the order of the program.
    """

    chunk: Sizes = inf
    window: Sizes = 0
    piece: int = 0
    credit: float = 0
    cut: float = inf
    patience: float = 0.0
    program_order: bool = False

    def chunk_of(self, kind: int) -> float:
        """Return the most bytes of one collective of a kind in a message."""
        return _of_kind(self.chunk, kind)

    def window_of(self, kind: int) -> float:
        """Return the bytes up to which a message of a kind is filled."""
        return _of_kind(self.window, kind)

    def effect(self, largest: Mapping[int, int], total: Mapping[int, int]) -> tuple[object, ...]:
        """Return what rules that take the ops of a graph alike have in common: sizes count up to its collectives'.

        Args:
            largest: kind → the bytes of its largest collective.
            total: kind → the bytes of all its collectives.
        """
        chunks = tuple(min(self.chunk_of(kind), size) for kind, size in largest.items())
        windows = tuple(min(self.window_of(kind), size) for kind, size in total.items())
        whole = not self.credit and windows == tuple(total.values())  # all that is left fits in, and nothing is cut
        return chunks, windows, 0 if whole else self.piece, self.credit, self.cut, self.patience, self.program_order


def _of_kind(sizes: Sizes, kind: int) -> float:
    return sizes.get(kind, 0.0) if isinstance(sizes, Mapping) else sizes


def aligned(size: int) -> int:
    """Return the bytes of which a chunk of a collective is a multiple: whole elements of any dtype, if it has many."""
    return 16 if size >= 4096 else 1


# -- memory ------------------------------------------------------------------------------------------------------------
#
# Count the bytes that are alive in each line of a schedule.
#
# A result is alive from the line in which its op begins to the line in which its last reader ends. An op that computes
# ends in its own line, a collective in its last wait. A result that no op reads is alive to the end. The results of a
# bucket of all-reduces are views of one buffer, which is alive as long as any of them.


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


# -- list scheduling ---------------------------------------------------------------------------------------------------


Keys = Sequence[Any]  # op → what decides who goes first; the smallest does

LOOKED_AT, LOOKED_AT_FOR_MEMORY = 8, 64  # ready ops that are tried until one fits, without and with a memory limit


class OutOfMemory(Exception):
    """No op that is ready fits into the memory."""


@dataclass
class _Stream:
    """A stream of collectives: the ready ones, and the messages that are started and not done.

    ``bytes``: the sum of these messages. ``free``: when the last of them ends, in seconds.
    """

    ready: list[tuple[Any, int, int]] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    bytes: int = 0
    free: float = 0.0


def arrange(graph: Graph, keys: Keys, rule: Rule, memory: float = inf) -> Draft:
    """Return the lines that a rule makes. It takes a few heap operations for each op and message.

    Args:
        graph: the ops.
        keys: op → its key; the smallest goes first, and among equal ones the first op.
        rule: how messages are made.
        memory: the most bytes that may be alive in a line.

    Raises:
        OutOfMemory: nothing that is ready fits.
    """
    return _Arrangement(graph, keys, rule, memory).run()


class _Arrangement:
    """One run of list scheduling, from event to event: the end of an op or of a message."""

    def __init__(self, graph: Graph, keys: Keys, rule: Rule, memory: float) -> None:
        self.graph, self.keys, self.rule = graph, keys, rule
        self.memory = memory
        self.draft = Draft(graph)
        self.missing = [len(before) for before in graph.before]
        self.sent = [0] * len(graph)  # bytes that are started
        self.left = list(graph.bytes)  # bytes that are not done
        self.streams = [_Stream() for _ in graph.streams]
        self.computable: list[tuple[Any, int, int]] = []
        self.running = -1  # the op that computes
        self.events: list[tuple[float, int, int]] = []  # time, message or -1 for the op, op
        self.ends: list[float] = []  # of messages
        self.begins: list[float] = []
        self.next_in_order = 0
        self.now = 0.0
        self.alive = 0
        self.unread = [len(users) for users in graph.users]
        self.unwaited: set[int] = set()  # collectives that have ended, and no line waits for

    def run(self) -> Draft:
        for i, count in enumerate(self.missing):
            if not count:
                self.push(i)
        while True:
            self.take()
            if not self.events:
                break
            self.now = self.events[0][0]
            while self.events and self.events[0][0] <= self.now:
                _, message, i = heapq.heappop(self.events)
                if message < 0:
                    self.running = -1
                    self.finish(i)
                elif self.ends[message] <= self.now:
                    self.end(message)
        if self.computable or any(stream.ready for stream in self.streams):
            raise OutOfMemory
        return self.draft.finished()

    # -- ops that become ready -----------------------------------------------------------------------------------------

    def push(self, i: int) -> None:
        item = self.keys[i], self.graph.position[i], i
        stream = self.graph.stream[i]
        if not stream:
            heapq.heappush(self.computable, item)
            return
        heapq.heappush(self.streams[stream].ready, item)
        if self.rule.cut < inf:
            self.cut(stream, i)

    def finish(self, i: int) -> None:
        """Make the successors of an op that has ended ready, if it was their last predecessor."""
        if self.graph.stream[i]:
            self.unwaited.add(i)
        else:
            self.release(i)
        for j in self.graph.readers[i]:
            self.missing[j] -= 1
            if not self.missing[j]:
                self.push(j)

    def release(self, i: int) -> None:
        """Free the results that an op has read, if no other op reads them."""
        for j in self.graph.reads[i]:
            self.unread[j] -= 1
            if not self.unread[j]:
                self.alive -= self.graph.memory[j]

    def read(self, i: int) -> None:
        """Allocate the result of an op. Its line waits for the collectives that it reads, whose operands are freed."""
        if not self.sent[i]:
            self.alive += self.graph.memory[i]
        for j in self.graph.before[i]:
            if j in self.unwaited:
                self.unwaited.remove(j)
                self.release(j)

    def end(self, message: int) -> None:
        parts = self.draft.messages[message]
        stream = self.streams[self.graph.stream[parts[0][0]]]
        if message not in stream.running:
            return  # it was cut, and ended at another event
        stream.running.remove(message)
        for i, begin, end in parts:
            stream.bytes -= end - begin
            self.left[i] -= end - begin
            if not self.left[i]:
                self.finish(i)

    # -- ops that are taken --------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Give each free stream its next op. Where memory is limited, computation takes first."""
        for computes in (self.memory < inf, self.memory == inf):
            if computes and self.running < 0 and self.computable:
                self.compute()
            for stream in self.streams[1:]:
                while stream.ready and self.start(stream):
                    pass
        if self.running < 0 and self.computable and not self.events:
            self.compute(force=True)

    def fits(self, i: int) -> bool:
        return self.alive + self.graph.memory[i] <= self.memory

    def compute(self, force: bool = False) -> None:
        chosen = self.choose(force)
        if chosen is None:
            return
        _, _, i = chosen
        self.read(i)
        self.next_in_order += 1
        self.draft.compute(i)
        self.running = i
        heapq.heappush(self.events, (self.now + self.graph.seconds[i], -1, i))

    def choose(self, force: bool) -> tuple[Any, int, int] | None:
        """Return the op that computes next, taken from the ready ones; ``None`` to wait."""
        heap, graph = self.computable, self.graph
        if self.rule.program_order:
            if heap[0][2] != graph.computations[self.next_in_order] or not self.fits(heap[0][2]):
                return None
            return heapq.heappop(heap)
        aside: list[tuple[Any, int, int]] = []
        chosen = None
        coming, gap = (None, inf) if force or not self.rule.patience else self.coming(heap[0][0])
        while heap and len(aside) < (LOOKED_AT if self.memory == inf else LOOKED_AT_FOR_MEMORY):
            item = heapq.heappop(heap)
            seconds = graph.seconds[item[2]]
            if self.fits(item[2]) and (coming is None or seconds <= gap or gap >= self.rule.patience * seconds):
                chosen = item
                break
            aside.append(item)
        for item in aside:
            heapq.heappush(heap, item)
        return chosen

    def coming(self, key: Any) -> tuple[int | None, float]:
        """Return a more urgent op that waits only for a message under way, and in how many seconds it is ready."""
        best, gap = None, inf
        for stream in self.streams[1:]:
            for message in stream.running:
                until = self.ends[message] - self.now
                for i, begin, end in self.draft.messages[message]:
                    if self.left[i] == end - begin and until < gap:
                        for j in self.graph.readers[i]:
                            if self.missing[j] == 1 and not self.graph.stream[j] and self.keys[j] < key:
                                best, gap = j, until
        return best, gap

    def start(self, stream: _Stream) -> bool:
        """Start the next message of a stream, if its credit allows one more; return whether one was started."""
        rule = self.rule
        if stream.running and (not rule.credit or stream.bytes >= rule.credit):
            return False
        aside: list[tuple[Any, int, int]] = []
        while stream.ready:
            i = stream.ready[0][2]
            if self.sent[i] or self.fits(i):
                break
            aside.append(heapq.heappop(stream.ready))
        parts = self.parts(stream) if stream.ready else []
        for item in aside:
            heapq.heappush(stream.ready, item)
        if not parts:
            return False
        message = self.draft.start(parts)
        begin = max(self.now, stream.free)
        stream.free = begin + self.graph.message_seconds(parts)
        self.begins.append(begin)
        self.ends.append(stream.free)
        stream.running.append(message)
        heapq.heappush(self.events, (stream.free, message, parts[0][0]))
        return True

    def parts(self, stream: _Stream) -> list[PartOf]:
        """Take the parts of the next message."""
        graph, rule = self.graph, self.rule
        first = stream.ready[0][2]
        credit = rule.credit - stream.bytes if stream.running else inf
        kind = graph.kind[first]
        size = min(graph.bytes[first] - self.sent[first], max(1, rule.chunk_of(kind)))
        if size > credit:
            return []
        parts = [self.part(stream, int(size))]
        if not graph.bytes[first]:
            return parts
        room = int(min(rule.window_of(kind), credit) - size)
        aside: list[tuple[Any, int, int]] = []
        while room > 0 and stream.ready and len(aside) < LOOKED_AT:
            i = stream.ready[0][2]
            left = graph.bytes[i] - self.sent[i]
            size = left if left <= room else room // rule.piece * rule.piece if rule.piece else 0
            fits = self.sent[i] or self.fits(i)
            if graph.kind[i] != graph.kind[first] or not graph.bytes[i] or not size or not fits:
                aside.append(heapq.heappop(stream.ready))
                continue
            parts.append(self.part(stream, size))
            room -= size
        for item in aside:
            heapq.heappush(stream.ready, item)
        return parts

    def part(self, stream: _Stream, size: int) -> PartOf:
        """Take bytes of the first ready collective."""
        i = stream.ready[0][2]
        begin = self.sent[i]
        if not begin:
            self.read(i)
        self.sent[i] += size
        stream.bytes += size
        if self.sent[i] == self.graph.bytes[i]:
            heapq.heappop(stream.ready)
        return i, begin, begin + size

    def cut(self, number: int, urgent: int) -> None:
        """Cut the running message of a stream at the present time, for a more urgent one; the rest is sent later."""
        stream, graph = self.streams[number], self.graph
        if len(stream.running) != 1:
            return
        message = stream.running[0]
        if len(self.draft.messages[message]) != 1:
            return
        ((i, begin, end),) = self.draft.messages[message]
        if not graph.flow[i] or not self.keys[urgent] < self.keys[i]:
            return
        sent = (self.now - self.begins[message] - graph.fixed[i]) / graph.flow[i] * graph.bytes[i]
        step = aligned(graph.bytes[i])
        at = begin + -(-int(sent) // step) * step if sent > 0 else begin
        ends = self.begins[message] + graph.message_seconds([(i, begin, at)]) if at > begin else self.now
        if at <= begin or at >= end or self.ends[message] - ends < self.rule.cut:
            return
        self.draft.messages[message] = [(i, begin, at)]
        self.ends[message] = stream.free = max(self.now, ends)
        heapq.heappush(self.events, (self.ends[message], message, i))
        stream.bytes -= end - at
        was_whole = self.sent[i] == graph.bytes[i]
        self.sent[i] = at
        if was_whole:
            heapq.heappush(stream.ready, (self.keys[i], graph.position[i], i))


def layer_keys(graph: Graph) -> list[int]:
    """Return keys with which ops keep the order of the program, and a collective goes before those read after it."""
    keys = list(graph.position)
    for i in reversed(graph.collectives):  # the key of its first reader, through other collectives too
        keys[i] = min([keys[j] for j in graph.readers[i]], default=len(graph))
    return keys
