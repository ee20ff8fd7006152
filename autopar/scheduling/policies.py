"""List the policies that decide an order, each with its source: a host that dispatches, buckets, list scheduling."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import ScheduleError, shown
from autopar.scheduling.graph import Graph
from autopar.scheduling.lines import Draft
from autopar.scheduling.list_scheduling import Rule, arrange, layer_keys

# -- dispatch ----------------------------------------------------------------------------------------------------------
#
# Order ops as a host dispatches them, without times: always the ready op with the smallest key.
#
# An op is ready when all ops that it reads have been dispatched. Starting a collective never blocks. An op that reads a
# collective blocks, because it waits, unless an earlier op has waited for the same collective. The policies
# ``"communication-first"`` and ``"compute-first"`` differ in whether ops that block go first (PaddlePaddle #47471).


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


# -- buckets -----------------------------------------------------------------------------------------------------------
#
# Put gradients in buckets in a fixed order, as DistributedDataParallel does: the first is small, the others large.
#
# Collectives share buckets if the next one of their stream and kind is produced before they are first read (Li et al.,
# PyTorch Distributed, VLDB 2020). This holds for gradients, and not for the all-reduces of tensor parallelism. The
# others start where they stand in the program. Collectives that need no computation, such as the gathers of ZeRO 3, run
# one ahead: each starts where the one before it is first read (Zhao et al., PyTorch FSDP, VLDB 2023).


MIB = 2**20
FIRST, OTHERS = MIB, 25 * MIB  # bytes


def late(graph: Graph) -> set[int]:
    """Return the collectives that share buckets."""
    last: dict[int, int] = {}  # kind → the latest of its collectives
    found = set()
    for i in graph.collectives:
        if not graph.bytes[i] or not graph.before[i]:
            continue
        before = last.get(graph.kind[i])
        if before is not None and graph.position[i] < graph.first_reader[before]:
            found |= {before, i}
        last[graph.kind[i]] = i
    return found


def fifo(graph: Graph) -> Draft:
    """Return the ops in order, with gradients in buckets in the order in which they are computed."""
    return _Buckets(graph, {}).run()


def reverse(graph: Graph) -> Draft:
    """Return the ops in order, with gradients in buckets in the reverse order of their parameters.

    Parameters have the order in which their gradients are first read, which is that of the next forward. A bucket
    starts after the ones before it, when its last gradient is there.
    """
    gradients = sorted(late(graph), key=lambda i: (-graph.first_reader[i], graph.position[i]))
    buckets: dict[int, list[list[int]]] = {}  # kind → its buckets
    filled: dict[int, int] = {}
    for i in gradients:
        of_kind = buckets.setdefault(graph.kind[i], [])
        if not of_kind or filled[graph.kind[i]] >= (FIRST if len(of_kind) == 1 else OTHERS):
            of_kind.append([])
            filled[graph.kind[i]] = 0
        of_kind[-1].append(i)
        filled[graph.kind[i]] += graph.bytes[i]
    return _Buckets(graph, buckets).run()


class _Buckets:
    """Walks over the ops in order, and starts buckets and other collectives where they are due.

    Attributes:
        planned: kind → its buckets, in the order in which they start. Where this is empty, a bucket takes the gradients
            in the order in which they are computed, and starts when it is full.
    """

    def __init__(self, graph: Graph, planned: dict[int, list[list[int]]]) -> None:
        self.graph, self.planned, self.draft = graph, planned, Draft(graph)
        self.shared = late(graph)
        self.next = _one_ahead(graph)
        self.held_back = set(self.next.values())
        self.open: dict[int, list[int]] = {}  # kind → collectives that can start, and have not
        self.filled: dict[int, int] = {}
        self.limit: dict[int, int] = {}
        self.started: set[int] = set()

    def run(self) -> Draft:
        for i in self.graph.order:
            for j in self.graph.before[i]:
                self.due(j)
            if not self.graph.stream[i]:
                self.draft.compute(i)
            elif i in self.shared:
                self.add(i)
            elif i not in self.held_back:
                self.start([i])
        for i in self.graph.collectives:
            self.due(i)
        return self.draft.finished()

    def start(self, members: list[int]) -> None:
        members = [i for i in members if i not in self.started]
        self.started.update(members)
        if members:
            self.draft.start([self.graph.whole(i) for i in members])

    def due(self, i: int) -> None:
        """Start a collective that is read now, and the one that runs ahead of it."""
        if self.graph.stream[i] and i not in self.started:
            self.start(self.open.pop(self.graph.kind[i]) if i in self.shared else [i])
        if i in self.next:
            self.start([self.next[i]])

    def add(self, i: int) -> None:
        kind = self.graph.kind[i]
        waiting = self.open.setdefault(kind, [])
        waiting.append(i)
        if self.planned:
            buckets = self.planned[kind]
            while buckets and set(buckets[0]) <= set(waiting):
                bucket = buckets.pop(0)
                self.open[kind] = waiting = [j for j in waiting if j not in bucket]
                self.start(bucket)
            return
        self.filled[kind] = self.filled.get(kind, 0) + self.graph.bytes[i]
        if self.filled[kind] >= self.limit.get(kind, FIRST):
            self.limit[kind], self.filled[kind] = OTHERS, 0
            self.start(self.open.pop(kind))


def _one_ahead(graph: Graph) -> dict[int, int]:
    """Map each collective that needs no computation to the next of its stream and kind, by the places of readers."""
    pairs: dict[int, int] = {}
    last: dict[int, int] = {}
    for i in sorted(graph.collectives, key=lambda i: (graph.first_reader[i], graph.position[i])):
        if not graph.before[i]:
            if graph.kind[i] in last:
                pairs[last[graph.kind[i]]] = i
            last[graph.kind[i]] = i
    return pairs


# -- policies ----------------------------------------------------------------------------------------------------------


P3_SLICE = 200_000  # bytes: 50,000 parameters of float32
MOST_MESSAGES = 1_000_000  # of one schedule: more take minutes and gigabytes


@dataclass(frozen=True)
class ByteScheduler:
    """A policy with its two sizes (Peng et al., SOSP 2019).

    Attributes:
        partition: bytes; collectives are cut into pieces of this size.
        credit: bytes that may be started and not yet done.
        fused: whether all pieces that fit into the credit are one message, and pay the start-up cost once.
    """

    partition: int = 4 * 2**20
    credit: int = 16 * 2**20
    fused: bool = True

    def __post_init__(self) -> None:
        for label in ("partition", "credit"):
            value = getattr(self, label)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{label}={shown(value)} is no number of bytes")
            if value < 1:
                raise ScheduleError(f"{label}={value}; give at least 1 byte")
        if self.credit < self.partition:
            raise ScheduleError(
                f"credit={self.credit} is less than partition={self.partition}, so that no piece could start; give a "
                f"credit of at least a partition"
            )

    @property
    def rule(self) -> Rule:
        """The rule of list scheduling with these sizes."""
        if self.fused:
            window = self.credit // self.partition * self.partition
            return Rule(chunk=window, window=window, piece=self.partition, program_order=True)
        return Rule(chunk=self.partition, credit=self.credit, program_order=True)


@dataclass(frozen=True)
class Policy:
    """One policy.

    Attributes:
        title: what it does, and its source.
        order: the ops → the lines; ``None`` where ``decide`` makes them.
        by_time: whether the lines come from simulated times. Then, on a CPU, each start is moved to its operand
            (``placement.hoisted``).
    """

    title: str
    order: Callable[[Graph], Draft] | None = None
    by_time: bool = False


def by_layer(graph: Graph, rule: Rule) -> Draft:
    """Return the lines in which the collective that is read first goes first, and ops compute in program order.

    Raises:
        ScheduleError: the rule cuts the collectives into more messages than can be scheduled.
    """
    assert isinstance(rule.chunk, int)
    messages = {i: -(-graph.bytes[i] // rule.chunk) for i in graph.collectives}
    if sum(messages.values()) > MOST_MESSAGES:
        most = max(messages, key=messages.__getitem__)
        raise ScheduleError(
            f"messages of {rule.chunk:,} bytes are {sum(messages.values()):,}, the most of them for "
            f"{graph.ops[most].name!r} with {graph.bytes[most]:,} bytes; at most {MOST_MESSAGES:,} are scheduled: give "
            f"ByteScheduler(partition, credit) with larger sizes"
        )
    return arrange(graph, layer_keys(graph), rule)


POLICIES: Mapping[str, Policy] = {
    "program": Policy("the order of the ops; a collective starts where it stands", in_order),
    "today": Policy("the order of the ops; gradients in buckets as they are computed (Li et al. 2020), gathers one "
                    "ahead (Zhao et al. 2023)", fifo),
    "communication-first": Policy("what waits for communication before other computation (PaddlePaddle before #47471)",
                                  lambda graph: two_levels(graph, blocking_first=True)),
    "compute-first": Policy("computation before what waits for communication (PaddlePaddle #47471)",
                            lambda graph: two_levels(graph, blocking_first=False)),
    "priorities": Policy("the user's integers, smaller first, then computation first (PaddlePaddle #49275)"),
    "ddp": Policy("gradients in buckets in the reverse order of parameters (DistributedDataParallel, Li et al. 2020)",
                  reverse),
    "p3": Policy("slices of gradients, those that are read first go first (P3, Jayarajan et al. 2019)",
                 lambda graph: by_layer(graph, Rule(chunk=P3_SLICE, program_order=True)), by_time=True),
    "bytescheduler": Policy("pieces of gradients, those that are read first go first, within a credit (ByteScheduler, "
                            "Peng et al. 2019)", lambda graph: by_layer(graph, ByteScheduler().rule), by_time=True),
    "longest-tail": Policy("what the most seconds depend on goes first; messages near √(θBS)"),
    "two-streams": Policy("the same, and late collectives in a second process group, where that is faster"),
}  # fmt: skip


def named(policy: object) -> str:
    """Return the name of a policy, or raise with the nearest one."""
    if not isinstance(policy, str):
        raise TypeError(f"a policy is a name, such as 'longest-tail', or ByteScheduler(…), not {shown(policy)}")
    if policy in POLICIES:
        return policy
    near = difflib.get_close_matches(policy.lower().replace("_", "-"), POLICIES, n=1)
    raise ScheduleError(
        f"there is no policy {shown(policy)}{f'; did you mean {near[0]!r}' if near else ''}; there are "
        f"{', '.join(POLICIES)}"
    )
