"""Record when each slot of a rank begins and ends, and how long the rank waits: messages that look at a clock.

    with recording() as recorder:               rank 1:  wait    FR00 of stage 1 from stage 0            0.1 – 0.8 ms
        step(batch)                       →              compute FW00 of stage 1 (micro-batch 0)         0.8 – 1.9 ms
                                                         launch  FS00 of stage 1 to stage 2              1.9 – 2.0 ms

They stand in the place of the rank's messages in a recorded step alone, so other steps take no time for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from autopar.pipeline import Task
from autopar.runtime.recording import LineKind, RecordedSlot, recorder
from autopar.runtime.running.messages import Message, Messages, Waits, Where, words_of


def recorded(messages: Messages, rank: int) -> Messages:
    """Return the messages of a rank, which are recorded inside of ``recording()``."""
    found = recorder()
    return messages if found is None else RecordedMessages(messages, found.marks.mark, found.slots.setdefault(rank, []))


class RecordedMessages:
    """Messages of a rank, with the times of its slots.

    Args:
        messages: the messages.
        now: marks a moment.
        slots: receives what is recorded, in the order in which it ends.
    """

    def __init__(self, messages: Messages, now: Callable[[], Any], slots: list[RecordedSlot]) -> None:
        self.device = messages.device
        self._messages, self._now, self._slots = messages, now, slots
        self._words: dict[object, str] = {}  # of the messages that nothing has waited for
        self._peers: dict[object, tuple[int, ...]] = {}  # task → the ranks at the other ends of its messages
        self._waited: Any = None  # when the last wait has ended in the present block

    def buffer(self, bytes: int) -> torch.Tensor:
        return self._messages.buffer(bytes)

    def release(self, buffer: torch.Tensor) -> None:
        self._messages.release(buffer)

    def start(self, messages: Sequence[Message]) -> None:
        self._words |= {message.task: message.words for message in messages}
        for message in messages:
            self._peers[message.task] = (*self._peers.get(message.task, ()), message.other)
        self._messages.start(messages)

    def wait(self, task: object) -> Waits:
        words, begin = self._words.pop(task, None), self._now()
        received = yield from self._messages.wait(task)
        if words is not None:
            self._add(words, "wait", begin, (task,) if isinstance(task, Task) else ())
            self._peers.pop(task, None)
        return received

    @contextmanager
    def _timed(self, where: Where) -> Iterator[None]:
        """Record a block. A pass begins when it has what it waits for."""
        begin, before, self._waited = self._now(), self._waited, None
        with self._messages.during(where):
            yield
        launches = isinstance(where, tuple) and not isinstance(where, Task)
        tasks = () if isinstance(where, str) else where if launches else (where,)
        ready = begin if self._waited is None else self._waited
        self._waited = before if self._waited is None else self._waited
        self._add(words_of(where), "start" if launches else "compute", ready, tasks)

    def during(self, where: Where) -> AbstractContextManager[object]:
        return self._timed(where)

    def _add(self, words: str, kind: LineKind, begin: Any, tasks: tuple[Any, ...]) -> None:
        end = self._now()
        if kind == "wait":
            self._waited = end
        peers = tuple(self._peers.get(task, ()) for task in tasks)
        self._slots.append(RecordedSlot(words, kind, begin, end, tasks, peers))
