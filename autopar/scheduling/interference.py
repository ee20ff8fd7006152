"""Simulate lines that slow each other down: ops beside messages, and messages of several streams on one link.

While a message is under way, ops take longer. Messages on one link share its bandwidth equally (processor sharing):
each of n messages takes n times its seconds, the start-up cost included. So a second stream moves no more bytes; its
gain is that a short message need not wait for the end of a long one. Two process groups over the same ranks are two
NCCL communicators, whose kernels run at the same time, or two sets of gloo sockets. In both cases the connections of
one network card get equal shares.

Paces change only when a message begins or ends. So the simulation goes from event to event: the next end of a message
or of the op, at the present paces.
"""

from __future__ import annotations

from collections import Counter

from autopar.scheduling.lines import COMPUTE, START, WAIT, Draft

Interval = tuple[float, float]


def slowed(draft: Draft, is_direct: bool, interference: float) -> tuple[list[Interval], list[Interval], float, float]:
    """Return begin and end of each op and of each message, the makespan, and the exposed communication, in seconds."""
    run = _Run(draft, is_direct, interference)
    while run.advance():
        pass
    return run.compute, run.messages, run.now, run.exposed


class _Run:
    """One run of the lines, advanced from event to event."""

    def __init__(self, draft: Draft, is_direct: bool, interference: float) -> None:
        self.draft, self.graph, self.slow = draft, draft.graph, 1.0 + interference
        self.host = [line for line in draft.lines if is_direct or line[0] != START]
        self.queues = draft.of_stream()
        self.issued = set() if is_direct else set(range(len(draft.messages)))
        self.at, self.heads = 0, [0] * len(self.queues)
        self.running: dict[int, tuple[int, float]] = {}  # stream → its message, and the seconds that are left of it
        self.left = -1.0  # seconds that are left of the op or start that the host runs; negative: it runs none
        self.unsent = list(self.graph.bytes)
        self.done = [False] * len(self.graph)
        self.over: set[int] = set()  # messages that have ended
        self.compute: list[Interval] = [(0.0, 0.0)] * len(self.graph)
        self.messages: list[Interval] = [(0.0, 0.0)] * len(draft.messages)
        self.now = self.exposed = 0.0

    def advance(self) -> bool:
        """Begin all that can begin now, and go on to the next event; ``False`` if there is none."""
        while self._begin_messages() or self._go_on():
            pass
        pace = self.slow if self.running else 1.0
        link = self.graph.link
        sharing = Counter(link[stream] for stream in self.running)
        ends = {stream: self.now + left * sharing[link[stream]] for stream, (_, left) in self.running.items()}
        then = min([*ends.values(), *([self.now + self.left * pace] if self.left >= 0 else [])], default=None)
        if then is None:
            return False
        if self.left >= 0:
            finishes = self.now + self.left * pace <= then
            self.left = 0.0 if finishes else max(0.0, self.left - (then - self.now) / pace)
        else:
            finishes = False
            self.exposed += then - self.now
        passed, self.now = then - self.now, then
        if finishes:
            self._end_line()
        for stream, end in ends.items():
            message, left = self.running[stream]
            if end <= then:
                del self.running[stream]
                self._end_message(message)
            else:
                self.running[stream] = message, max(0.0, left - passed / sharing[link[stream]])
        return True

    def _begin_messages(self) -> bool:
        began = False
        for stream, queue in enumerate(self.queues):
            if stream in self.running or self.heads[stream] == len(queue):
                continue
            message = queue[self.heads[stream]]
            parts = self.draft.messages[message]
            if message in self.issued and all(self.done[j] for i, _, _ in parts for j in self.graph.before[i]):
                self.messages[message] = self.now, self.now
                self.heads[stream] += 1
                self.running[stream] = message, self.graph.message_seconds(parts)
                began = True
        return began

    def _go_on(self) -> bool:
        """Issue the next line of the host, if nothing holds it back."""
        if self.left >= 0 or self.at == len(self.host):
            return False
        kind, ref = self.host[self.at]
        if kind == WAIT:
            if ref not in self.over:
                return False
            self.at += 1
            return True
        self.left = self.graph.start_seconds if kind == START else self.graph.seconds[ref]
        if kind == COMPUTE:
            self.compute[ref] = self.now, self.now
        if not self.left:
            self._end_line()
        return True

    def _end_line(self) -> None:
        """End the op or the start that the host is busy with."""
        kind, ref = self.host[self.at]
        if kind == START:
            self.issued.add(ref)
        else:
            self.compute[ref] = self.compute[ref][0], self.now
            self.done[ref] = True
        self.left = -1.0
        self.at += 1

    def _end_message(self, message: int) -> None:
        self.over.add(message)
        self.messages[message] = self.messages[message][0], self.now
        for i, begin, end in self.draft.messages[message]:
            self.unsent[i] -= end - begin
            self.done[i] = not self.unsent[i]
