"""Run the tasks of all ranks until each rank has finished or waits forever, and find who waits for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.streams import Stream
from autopar.verify.channels.tasks import Channels, Collective, Receive, Send, Step

Pair = tuple[int, int, str]  # the sender, the receiver, and the stream of their messages


@dataclass(slots=True)
class _Progress:
    """How many messages of an ordered pair of ranks, on one stream, are posted, and how many are done."""

    sends: int = 0
    receives: int = 0
    sent: int = 0
    received: int = 0


class Run:
    """A run of all ranks until each has finished or waits forever; ``blocked`` lists those that wait.

    No rank chooses between tasks, so an event that is possible stays possible until it happens. One run therefore
    decides for all orders of events (the ranks are a marked graph: Commoner, Holt, Even, Pnueli, "Marked directed
    graphs", 1971).
    """

    def __init__(self, steps: Mapping[int, Sequence[Step]], channels: Channels) -> None:
        self.steps, self.channels = steps, channels
        self.at = dict.fromkeys(steps, -1)
        self.pairs: dict[Pair, _Progress] = {}
        arrived: dict[Stream, int] = {}
        left = dict.fromkeys(steps, 0)  # rank → messages of its step that are not done
        ready = list(steps)
        while ready:
            rank = ready.pop()
            self.at[rank] += 1
            if self.at[rank] == len(steps[rank]):
                continue
            step = steps[rank][self.at[rank]]
            left[rank] = len(step)
            for task in step:
                if isinstance(task, Collective):
                    arrivals = arrived[task.group] = arrived.get(task.group, 0) + 1
                    if arrivals == len(task.ranks):
                        arrived[task.group] = 0
                        ready += task.ranks
                    continue
                for end, done in self._post(rank, task):
                    left[end] -= done
                    if done and not left[end]:
                        ready.append(end)
        self.blocked = [rank for rank in steps if self.at[rank] < len(steps[rank])]

    def _post(self, rank: int, task: Send | Receive) -> tuple[tuple[int, int], tuple[int, int]]:
        """Post a message, and return (rank, newly done messages) for the sender and for the receiver."""
        sender, receiver, _ = key = pair_of(rank, task)
        pair = self.pairs.setdefault(key, _Progress())
        if isinstance(task, Send):
            pair.sends += 1
        else:
            pair.receives += 1
        sent, received = pair.sent, pair.received
        pair.received = min(pair.sends, pair.receives)
        room = self.channels.capacity
        pair.sent = pair.sends if room is None else min(pair.sends, pair.received + room)
        return (sender, pair.sent - sent), (receiver, pair.received - received)

    def cycle(self) -> list[tuple[int, Collective | Send | Receive]]:
        """Return ranks that wait for each other in a cycle, with the tasks they wait in.

        Each waits for the next, and the last for the first.
        """
        waits: dict[int, Collective | Send | Receive] = {}
        rank = self.blocked[0]
        while rank not in waits:
            waits[rank], rank = self._wait(rank)
        ring = list(waits)[list(waits).index(rank) :]
        start = ring.index(min(ring))
        return [(rank, waits[rank]) for rank in ring[start:] + ring[:start]]

    def _wait(self, rank: int) -> tuple[Collective | Send | Receive, int]:
        """Return the first unfinished task of a blocked rank, and the rank that it waits for, which is blocked too."""
        step = self.steps[rank][self.at[rank]]
        (first, *_) = step
        if isinstance(first, Collective):
            return first, next(m for m in first.ranks if self.steps[m][self.at[m]] != (first,))
        task: Send | Receive = first
        posted: Counter[Pair] = Counter()
        for message in reversed(step):  # the last messages of each pair are the unfinished ones
            assert not isinstance(message, Collective)
            pair = self.pairs[key := pair_of(rank, message)]
            posted[key] += 1
            if posted[key] <= (pair.sends - pair.sent if isinstance(message, Send) else pair.receives - pair.received):
                task = message
        return task, task.to if isinstance(task, Send) else task.source


def pair_of(rank: int, task: Send | Receive) -> Pair:
    """Return what orders a message of a rank."""
    return (rank, task.to, task.stream) if isinstance(task, Send) else (task.source, rank, task.stream)
