"""Index the ops of a step by numbers, check what they read, and price messages.

The number of an op is its position in the sequence of ops. ``order`` is a topological order; it is the sequence itself
if each op stands after the ops that it reads. The seconds of a collective are a fixed part, which each message pays
once, and a part in proportion to its bytes:

    seconds of a message = largest fixed part + sum over its parts of (share of the bytes · proportional part)
"""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from autopar.errors import ScheduleError, shown
from autopar.scheduling.op import COMPUTE, Op

PartOf = tuple[int, int, int]  # op, begin and end of a range of its bytes; (op, 0, 0) for one of 0 bytes


class Graph:
    """The ops of a step by number.

    Attributes:
        ops: as given.
        before, readers: op → its predecessors, which must be over before it begins, and its successors.
        reads, users: op → the predecessors whose results it reads, and the successors that read its result.
        order: a topological order, nearest to that of ``ops``.
        streams: the names of the streams; the first is ``"compute"``.
        stream: op → the index of its stream; 0 computes.
        link: stream → the index of the first stream that has its link; that of ``"compute"`` is 0.
        shares: whether any two streams share a link.
        seconds, fixed, flow: op → its seconds; the part of them that each message pays; the rest.
        bytes: op → the bytes that it sends; 0 if it computes.
        kind: op → a number; only collectives with the same number share a message.
        memory: op → the bytes of its result.
    """

    def __init__(
        self, ops: Iterable[Op], startup: float | Mapping[str, float] = 0.0, start_seconds: float = 0.0
    ) -> None:
        """Index the ops.

        Args:
            startup: the fixed seconds of each collective, for all of them or by name.
            start_seconds: the seconds of the host for each start of a message, where the host computes itself.

        Raises:
            ScheduleError: a name is given twice or unknown, or ops read each other in a circle.
            TypeError: an item of ``ops`` is no ``Op``.
        """
        if not isinstance(ops, Iterable):
            raise TypeError(f"ops are a sequence of Op(name, stream, seconds, …), not {shown(ops)}")
        self.ops, self.start_seconds = tuple(ops), start_seconds
        for op in self.ops:
            if not isinstance(op, Op):
                raise TypeError(f"ops are Op(name, stream, seconds, …), not {shown(op)}")
        self.number = {op.name: i for i, op in enumerate(self.ops)}
        if len(self.number) < len(self.ops):
            doubled = next(op.name for i, op in enumerate(self.ops) if self.number[op.name] != i)
            raise ScheduleError(f"two ops have the name {doubled!r}; each needs its own")
        self.reads = [self._numbers(op, op.after) for op in self.ops]
        self.before = [self._numbers(op, op.before) if op.behind else reads
                       for op, reads in zip(self.ops, self.reads, strict=True)]  # fmt: skip
        self.users, self.readers = _turned(self.reads), _turned(self.before)
        self.streams = (COMPUTE, *sorted({op.stream for op in self.ops} - {COMPUTE}))
        index = {name: s for s, name in enumerate(self.streams)}
        self.stream = [index[op.stream] for op in self.ops]
        self.link = self._links(index)
        self.shares = self.link != list(range(len(self.streams)))
        kinds: dict[object, int] = {}
        self.kind = [kinds.setdefault((op.stream, op.kind), len(kinds)) for op in self.ops]
        self.seconds = [float(op.seconds) for op in self.ops]
        self.bytes = [0 if op.computes else op.bytes for op in self.ops]
        fixed = startup if isinstance(startup, Mapping) else dict.fromkeys(self.number, startup)
        self.fixed = [
            min(fixed.get(op.name, 0.0), op.seconds) if size else 0.0
            for op, size in zip(self.ops, self.bytes, strict=True)
        ]
        self.flow = [s - f for s, f in zip(self.seconds, self.fixed, strict=True)]
        self.memory = [op.memory for op in self.ops]
        self.order = self._topological()

    def _links(self, index: Mapping[str, int]) -> list[int]:
        """Return stream → the index of the first stream with its link.

        Raises:
            ScheduleError: the ops of a stream have several links.
        """
        links: dict[str, str] = {}
        for op in self.ops:
            link = links.setdefault(op.stream, op.link or op.stream)
            if link != (op.link or op.stream):
                raise ScheduleError(
                    f"the ops of the stream {op.stream!r} have the links {link!r} and {op.link or op.stream!r}, the "
                    f"latter in {op.name!r}; a stream has one link"
                )
        first: dict[str, int] = {}
        return [first.setdefault(links.get(name, name), index.get(name, 0)) for name in self.streams]

    def _numbers(self, op: Op, names: Sequence[str]) -> list[int]:
        try:
            return list(dict.fromkeys([self.number[name] for name in names]))
        except KeyError as error:
            unknown = error.args[0]
            text = f"op {op.name!r} reads {unknown!r}, which is no op{near(unknown, self.number)}"
            raise ScheduleError(text) from None

    def _topological(self) -> list[int]:
        missing = [len(before) for before in self.before]
        ready = [i for i, count in enumerate(missing) if not count]
        order = []
        while ready:
            i = heapq.heappop(ready)
            order.append(i)
            for j in self.readers[i]:
                missing[j] -= 1
                if not missing[j]:
                    heapq.heappush(ready, j)
        if len(order) < len(self.ops):
            raise ScheduleError(f"ops read each other in a circle: {' → '.join(self._circle(missing))}")
        return order

    def _circle(self, missing: Sequence[int]) -> list[str]:
        """Return the names of the ops of one circle; ``missing``: op → how many of its predecessors can never run."""
        at, seen = next(i for i, count in enumerate(missing) if count), list[int]()
        while at not in seen:
            seen.append(at)
            at = next(j for j in self.before[at] if missing[j])
        return [self.ops[i].name for i in (*seen[seen.index(at) :], at)][::-1]

    def __len__(self) -> int:
        return len(self.ops)

    @cached_property
    def position(self) -> list[int]:
        """op → its place in ``order``."""
        position = [0] * len(self.ops)
        for place, i in enumerate(self.order):
            position[i] = place
        return position

    @cached_property
    def first_reader(self) -> list[int]:
        """op → the place in ``order`` of its first reader; the number of ops if nothing reads it."""
        return [min([self.position[j] for j in readers], default=len(self.ops)) for readers in self.readers]

    @cached_property
    def computations(self) -> list[int]:
        """The ops that compute, in ``order``."""
        return [i for i in self.order if not self.stream[i]]

    @cached_property
    def collectives(self) -> list[int]:
        """The ops that communicate, in ``order``."""
        return [i for i in self.order if self.stream[i]]

    def whole(self, i: int) -> PartOf:
        """Return all bytes of an op as one part."""
        return i, 0, self.bytes[i]

    def message_seconds(self, parts: Sequence[PartOf]) -> float:
        """Return the seconds of a message of these parts."""
        if len(parts) == 1:
            i, begin, end = parts[0]
            size = self.bytes[i]
            if end - begin == size:
                return self.seconds[i]
            return self.fixed[i] + self.flow[i] * (end - begin) / size
        fixed = max([self.fixed[i] for i, _, _ in parts])
        return fixed + sum([self.flow[i] * ((end - begin) / self.bytes[i]) for i, begin, end in parts])

    def reversed(self) -> Graph:
        """Return the graph with all edges and the order reversed."""
        other = object.__new__(Graph)
        other.__dict__ |= {key: value for key, value in self.__dict__.items()
                           if key not in ("position", "first_reader", "computations", "collectives")}  # fmt: skip
        other.before, other.readers, other.order = self.readers, self.before, self.order[::-1]
        other.reads, other.users = self.users, self.reads
        return other


def _turned(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the edges reversed."""
    turned: list[list[int]] = [[] for _ in edges]
    for i, ends in enumerate(edges):
        for j in ends:
            turned[j].append(i)
    return turned


def near(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'loss'``, or nothing where no known name is near."""
    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, found))}" if found else ""
