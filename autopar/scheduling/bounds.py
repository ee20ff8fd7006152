"""Bound the seconds of every schedule from below: of any order, with any chunks and buckets, and with preemption.

    bound = max(critical path, per link: Jackson's preemptive bound, per stream: the bound with start-up costs, the
                bound of a host that computes itself)

A link carries the messages of one stream, or of several streams that share it. Messages that share a link take
together no less time than one after the other.

Jackson's bound is the makespan of one machine that may interrupt its jobs (Jackson 1955, Horn 1974). Job i is released
at head(i), takes p(i) seconds, and completes at least tail(i) before the makespan. The released job with the longest
tail always goes first. Heads and tails are the longest paths into and out of an op. Those of collectives are raised by
load: all computation that a collective depends on runs on one stream before it begins. So for each h, head >= h + the
seconds of its ancestors whose own heads are h or more. The same holds for tails and descendants.

A message pays the start-up cost θ once, however many collectives share it. Let it pay first and send then. So on the
machine a collective takes its seconds without θ, and is released θ later. Two collectives of which one depends on the
other never share a message; so those along one path through a link take all their seconds. The critical path counts
all seconds of each collective. ``startup_bound`` counts that many messages of one stream pay θ. Messages of several
streams may pay it at the same time. ``host_bound`` counts what starts take of a host that computes itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import numpy.typing

from autopar.scheduling.graph import Graph

# -- host bound --------------------------------------------------------------------------------------------------------
#
# Bound the seconds of every schedule from below where the host computes itself, and each start takes time of it.
#
#     bound = seconds of all computation + messages · seconds of a start
#     messages >= sum over kinds: most collectives of that kind along one path
#
# A message has collectives of one kind. Two of which one needs the other never share one, and one of 0 bytes shares
# none.


def host_bound(graph: Graph) -> float:
    """Return the bound; 0 where starts take no time of the host. Linear for a fixed number of kinds."""
    if not graph.start_seconds:
        return 0.0
    computed = sum(graph.seconds[i] for i in graph.computations)
    return computed + fewest_messages(graph) * graph.start_seconds


def fewest_messages(graph: Graph) -> int:
    """Return a number of messages that no schedule is below."""
    whole = sum(not graph.bytes[i] for i in graph.collectives)
    shared = [i for i in graph.collectives if graph.bytes[i]]
    return whole + sum(_longest_chain(graph, kind) for kind in {graph.kind[i] for i in shared})


def _longest_chain(graph: Graph, kind: int) -> int:
    """Return the most collectives of a kind, with bytes, along one path."""
    chain = [0] * len(graph)  # up to the op, with it
    for i in graph.order:
        chain[i] = max([chain[j] for j in graph.before[i]], default=0)
        chain[i] += graph.kind[i] == kind and graph.bytes[i] > 0
    return max(chain)


# -- startup bound -----------------------------------------------------------------------------------------------------
#
# Bound the seconds of one stream of collectives from below, where each message pays a start-up cost θ.
#
# Collective i is released at head(i), sends for flow(i) seconds, and must end tail(i) before the makespan T. It may be
# cut into chunks, and chunks of several collectives may share a message, which takes θ and then the flow of its parts.
# A message begins when all of its parts are released. Do not tell collectives apart, and let W be the sum of all flow.
# Then
#
# * F(t) is the most flow that messages send until t. A message that begins at r sends no more than R(r), the flow of
#   all collectives that are released by then. So F(t) = max over heads r <= t of min(R(r), F(r) + max(0, t - r - θ)).
#   It is enough that messages begin at heads: one that begins between two heads could begin at the earlier one and send
#   as much;
# * G(s) is the same backwards, with tails: the most flow of messages that begin at T - s or later.
#
# Take any time t, and the message that is under way at t, if there is one. If it has paid θ by then, cut it at t: the
# flow that it sends before t counts in F(t), and the rest is a message that begins at t - θ, pays θ and sends from t
# on, with the same end. If it has not, it sends nothing before t, and begins after t - θ. So the flow that is not sent
# until t is sent by messages that begin at t - θ or later, and W <= F(t) + G(T - t + θ). This holds for every t:
#
#     T >= max over t of t - θ + (the smallest s with G(s) >= W - F(t))
#
# With θ = 0 it is weaker than Jackson's bound, which tells collectives apart. Jackson's bound leaves out that each
# message pays θ, and that the first and the last messages must be small: few collectives are released before the first
# ones, and long tails follow the last ones.


Numbers = numpy.typing.NDArray[numpy.float64]

MOST = 512  # heads, or tails; more are rounded down to these, and the bound stays a lower bound
ROUNDING = 1e-12  # of the flow: sums of floats are not exact


def startup_bound(heads: Sequence[float], flows: Sequence[float], tails: Sequence[float], startup: float) -> float:
    """Return a lower bound of the seconds of all schedules of these collectives on one stream; 0 without collectives.

    Args:
        heads, flows, tails: seconds of each collective.
        startup: θ, the least seconds that a message pays.
    """
    flow = numpy.asarray(flows, float)
    whole = float(flow.sum())
    if not whole:
        return 0.0
    before, after = _Sent(numpy.asarray(heads, float), flow, startup), _Sent(numpy.asarray(tails, float), flow, startup)
    longest = 0.0
    for time in numpy.concatenate([before.begins, before.begins + startup, before.grows()]):
        left = whole - before.until(time)
        if left > ROUNDING * whole:
            longest = max(longest, float(time) - startup + after.needs(left))
    return longest


class _Sent:
    """The most flow that messages send until a time: F, or G with tails.

    Attributes:
        begins: the times at which messages may begin, ascending.
        released: for each of them, the flow of all collectives that are released by then.
        sent: for each of them, the most flow that has been sent.
    """

    def __init__(self, times: Numbers, flow: Numbers, startup: float) -> None:
        self.startup = startup
        self.begins, which = numpy.unique(times, return_inverse=True)
        if len(self.begins) > MOST:
            kept = numpy.linspace(0, len(self.begins) - 1, MOST).astype(int)
            which = numpy.searchsorted(kept, which, side="right") - 1
            self.begins = self.begins[kept]
        self.released = numpy.bincount(which, weights=flow, minlength=len(self.begins)).cumsum()
        self.sent = numpy.zeros(len(self.begins))
        for k in range(1, len(self.begins)):
            self.sent[k] = max(self.sent[k - 1], self._until(self.begins[k], k))

    def _until(self, time: float, count: int) -> float:
        """Return the most flow that is sent until a time by messages that begin at the first ``count`` begins."""
        grown = self.sent[:count] + numpy.maximum(0.0, time - self.begins[:count] - self.startup)
        return float(numpy.minimum(self.released[:count], grown).max(initial=0.0))

    def until(self, time: float) -> float:
        """Return the most flow that is sent until a time."""
        return self._until(time, int(numpy.searchsorted(self.begins, time, side="right")))

    def grows(self) -> Numbers:
        """Return for each begin but the first when a message from it has sent more than all that was released before.

        F may be flat until then.
        """
        return self.begins[1:] + self.startup + numpy.maximum(0.0, self.released[:-1] - self.sent[1:])

    def needs(self, flow: float) -> float:
        """Return the earliest time until which so much flow can be sent."""
        rounded = flow - ROUNDING * self.released[-1]  # a small rest of large sums has their rounding
        can = (self.released >= rounded) & (self.sent < flow)
        return float((self.begins[can] + self.startup + flow - self.sent[can]).min(initial=numpy.inf))


# -- bounds ------------------------------------------------------------------------------------------------------------


TWICE = 2000  # ops up to which heads and tails are raised a second time, from those that were raised once


@dataclass(frozen=True)
class Bound:
    """The bound, and for each op the least seconds before its begin (``heads``) and after its end (``tails``)."""

    seconds: float
    heads: list[float]
    tails: list[float]


def bound(graph: Graph) -> Bound:
    """Return the bound. For 25,000 ops it takes less than a second."""
    turned = graph.reversed()
    heads, tails = heads_of(graph), heads_of(turned)
    path = max([h + s + t for h, s, t in zip(heads, graph.seconds, tails, strict=True)], default=0.0)
    return Bound(max(path, host_bound(graph), *_of_machines(graph, heads, tails)), heads, tails)


def heads_of(graph: Graph) -> list[float]:
    """Return op → the least seconds before its begin: the longest path in, raised by load."""
    heads = longest_paths(graph)
    for _ in range(2 if len(graph) <= TWICE else 1):
        heads = _raised(graph, heads)
    return heads


def longest_paths(graph: Graph) -> list[float]:
    """Return op → the longest path in. Linear."""
    heads, seconds = [0.0] * len(graph), graph.seconds
    for i in graph.order:
        end = heads[i] + seconds[i]
        for j in graph.readers[i]:
            if end > heads[j]:
                heads[j] = end
    return heads


def _raised(graph: Graph, heads: list[float]) -> list[float]:
    """Return heads with those of collectives raised by the load of their ancestors that compute.

    A set of ancestors is an integer with one bit for each op that computes, the op with the longest head first. The
    sums over all its prefixes come from a table: eight bits at once → their seconds.
    """
    seconds = graph.seconds
    loads = sorted((i for i in graph.computations if seconds[i]), key=lambda i: -heads[i])
    if not loads:
        return heads
    size = -(-len(loads) // 8)
    bit = {i: 1 << place for place, i in enumerate(loads)}
    table, earliest = _tables(loads, seconds, heads, size)
    rows = numpy.arange(size) * 256
    raised = [0.0] * len(graph)
    ancestors: list[int] = [0] * len(graph)
    unread = [len(readers) for readers in graph.readers]
    for i in graph.order:
        head, mine = heads[i], 0
        for j in graph.before[i]:
            mine |= ancestors[j]
            head = max(head, raised[j] + seconds[j])
            unread[j] -= 1
            if not unread[j]:
                ancestors[j] = 0
        if graph.stream[i] and mine:
            bits = numpy.frombuffer(mine.to_bytes(size, "little"), numpy.uint8)
            sums = table[rows + bits].cumsum()
            head = max(head, float((sums + earliest).max(where=sums > 0, initial=0.0)))
        raised[i] = head
        ancestors[i] = mine | bit.get(i, 0)
    return raised


def _tables(
    loads: list[int], seconds: list[float], heads: list[float], size: int
) -> tuple[numpy.typing.NDArray[numpy.float64], numpy.typing.NDArray[numpy.float64]]:
    """Return for each byte of a set: its 256 values → seconds; and the shortest head of its ops.

    The table is ``[256 · size]``, the heads are ``[size]``.
    """
    each = numpy.zeros(size * 8)
    each[: len(loads)] = [seconds[i] for i in loads]
    values = numpy.unpackbits(numpy.arange(256, dtype=numpy.uint8)[:, None], axis=1, bitorder="little")
    earliest = numpy.array([heads[loads[min(8 * k + 7, len(loads) - 1)]] for k in range(size)])
    return (each.reshape(size, 8) @ values.T.astype(float)).ravel(), earliest


def _of_machines(graph: Graph, heads: list[float], tails: list[float]) -> Iterator[float]:
    """Yield Jackson's bound of each stream, and of each link that several streams share."""
    for stream in range(len(graph.streams)):
        on_it = [own == stream for own in graph.stream]
        yield _of_machine(graph, on_it, heads, tails)
        yield _of_startups(graph, on_it, heads, tails)
    for link in set(graph.link) if graph.shares else ():
        yield _of_machine(graph, [graph.link[own] == link for own in graph.stream], heads, tails)


def _of_machine(graph: Graph, on_it: list[bool], heads: list[float], tails: list[float]) -> float:
    """Return Jackson's bound of some ops. ``on_it``: op → whether it is one of them."""
    own = [i for i in graph.order if on_it[i]]
    alone = own if not any(graph.fixed) else _along_path(graph, on_it)
    taken = set(alone)
    jobs = [
        (heads[i], graph.seconds[i], tails[i]) if i in taken or not graph.bytes[i]
        else (heads[i] + graph.fixed[i], graph.flow[i], tails[i])
        for i in own
    ]  # fmt: skip
    return jackson(jobs)


def _of_startups(graph: Graph, on_it: list[bool], heads: list[float], tails: list[float]) -> float:
    """Return the bound of the collectives of a stream that counts start-up costs; 0 if there are none."""
    cut = [i for i in graph.order if on_it[i] and graph.bytes[i] and graph.fixed[i]]
    if not cut:
        return 0.0
    return startup_bound(
        [heads[i] for i in cut], [graph.flow[i] for i in cut], [tails[i] for i in cut],
        min(graph.fixed[i] for i in cut),
    )  # fmt: skip


def _along_path(graph: Graph, on_it: list[bool]) -> list[int]:
    """Return the collectives of a link along the path on which their start-up costs are most."""
    best, last = [0.0] * len(graph), [-1] * len(graph)  # with the op itself; the op before it on the path
    for i in graph.order:
        for j in graph.before[i]:
            if best[j] > best[i]:
                best[i], last[i] = best[j], j
        if on_it[i]:
            best[i] += graph.fixed[i]
    path, at = [], max(range(len(graph)), key=best.__getitem__, default=-1)
    while at >= 0:
        if on_it[at]:
            path.append(at)
        at = last[at]
    return path


def jackson(jobs: list[tuple[float, float, float]]) -> float:
    """Return the shortest makespan of one machine that may interrupt its jobs: (head, seconds, tail) each.

    The released job with the longest tail always runs (Jackson 1955, Horn 1974). n log n.
    """
    jobs = sorted(jobs)
    waiting: list[tuple[float, float]] = []  # - tail, seconds that are left
    now, longest, next_ = 0.0, 0.0, 0
    while waiting or next_ < len(jobs):
        if not waiting:
            now = max(now, jobs[next_][0])
        while next_ < len(jobs) and jobs[next_][0] <= now:
            _, seconds, tail = jobs[next_]
            heapq.heappush(waiting, (-tail, seconds))
            next_ += 1
        tail, left = waiting[0]
        arrival = jobs[next_][0] if next_ < len(jobs) else float("inf")
        if now + left <= arrival:
            heapq.heappop(waiting)
            now += left
            longest = max(longest, now - tail)
        else:
            heapq.heapreplace(waiting, (tail, left - (arrival - now)))
            now = arrival
    return longest
