"""Send and receive between the ranks of a pipelined step: on real processes, or between simulated ranks.

A slot launches its messages together. A rank waits for each message at its reader, or where a send buffer is freed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import distributed

from autopar.pipeline import Task
from autopar.runtime.current_slot import slot, waiting_for
from autopar.runtime.lowering.point_to_point import Handle, start
from autopar.runtime.lowering.point_to_point import MessageEnd as End
from autopar.runtime.recording import LineKind, RecordedSlot, recorder
from autopar.runtime.running.functions import slot_of
from autopar.runtime.simulation.in_flight import InFlight, Until
from autopar.runtime.spans import span
from autopar.torch_private import profiler_is_on

Waits = Generator[Any, Any, dict[int, torch.Tensor]]
Where = Task | tuple[Task, ...] | str  # a pass, the messages of a slot, or what runs outside of slots


def words_of(where: Where) -> str:
    """Return what errors call a part of a step."""
    if isinstance(where, str):
        return where
    return slot_of(where) if isinstance(where, Task) else " and ".join(task.where for task in where)


class Message(NamedTuple):
    """One end of a message of one task.

    Attributes:
        task: the task that it belongs to.
        is_send: whether it is sent.
        other: the rank at the other end.
        memory: the bytes that are sent, or the memory for what is received.
        tag: the number of the message, the same at both ends.
        words: what it is, in errors.
    """

    task: object
    is_send: bool
    other: int
    memory: torch.Tensor
    tag: int
    words: str


class Messages(Protocol):
    """Where a rank sends and receives."""

    @property
    def device(self) -> torch.device: ...

    def buffer(self, bytes: int) -> torch.Tensor:
        """Return memory to receive in."""
        ...

    def release(self, buffer: torch.Tensor) -> None:
        """Give the memory of a received message back."""
        ...

    def start(self, messages: Sequence[Message]) -> None:
        """Launch the messages of a slot, in their order."""
        ...

    def wait(self, task: object) -> Waits:
        """Wait for the messages of a task, once; return what was received, by sender.

        A task without messages has none to wait for: nothing crosses its boundary, or nothing to other ranks.
        """
        ...

    def during(self, where: Where) -> AbstractContextManager[object]:
        """Say in errors that what runs in the ``with`` block is a pass, launches messages, or is what the text says."""
        ...


_connected: list[Any] = []  # none or one: the default group whose ranks are connected


def connect(device: torch.device) -> None:
    """Connect all ranks, once for each default group. All ranks call it.

    NCCL connects the ranks of a group in its first call, which all of them must enter, and in the same order: the first
    messages of a slot would have only two. gloo has connected them when the group was made.
    """
    world = distributed.group.WORLD
    if device.type != "cpu" and (not _connected or _connected[0] is not world):
        distributed.all_reduce(torch.zeros(1, device=device))
        _connected[:] = [world]


@dataclass
class Pool:
    """Memory for received messages, which is used again and again.

    Attributes:
        made: how many buffers were allocated.
    """

    device: torch.device
    made: int = 0
    _free: dict[int, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))

    def buffer(self, bytes: int) -> torch.Tensor:
        if free := self._free[bytes]:
            return free.pop()
        self.made += 1
        return torch.empty(bytes, dtype=torch.uint8, device=self.device)

    def release(self, buffer: torch.Tensor) -> None:
        self._free[len(buffer)].append(buffer)

    @property
    def bytes(self) -> int:
        """The bytes that nothing is received in now."""
        return sum(size * len(buffers) for size, buffers in self._free.items())


class ProcessMessages:
    """Messages of this process.

    gloo matches messages by tags, and each task has its own handle. NCCL has no tags and runs the messages of a group
    one batch after the other, so the messages of a slot are one batch.

    Args:
        device: the device of the messages.
        pool: the memory for what is received.
        gate: called before messages are launched.
    """

    def __init__(self, device: torch.device, pool: Pool, gate: Callable[[], None] | None = None) -> None:
        self.device, self.pool, self.gate = device, pool, gate
        self._handles: dict[object, tuple[Handle, list[Message]]] = {}
        self._sent: dict[object, list[int]] = {}  # task → where the memory of its sends begins
        self._slots: dict[Where, slot] = {}

    def buffer(self, bytes: int) -> torch.Tensor:
        return self.pool.buffer(bytes)

    def release(self, buffer: torch.Tensor) -> None:
        at = buffer.untyped_storage().data_ptr()
        if not any(at in storages for storages in self._sent.values()):  # else a message still reads it
            self.pool.release(buffer)

    def start(self, messages: Sequence[Message]) -> None:
        if self.gate is not None:
            self.gate()
        by_task: dict[object, list[Message]] = defaultdict(list)
        for message in messages:
            by_task[message.task].append(message)
        if self.device.type != "cpu":
            shared = start([End(message.is_send, message.other, message.memory) for message in messages])
            self._handles |= {task: (shared, own) for task, own in by_task.items()}
        else:
            for task, own in by_task.items():
                ends = [End(message.is_send, message.other, message.memory) for message in own]
                self._handles[task] = start(ends, tag=own[0].tag), own
        for task, own in by_task.items():
            storages = [message.memory.untyped_storage().data_ptr() for message in own if message.is_send]
            if storages:
                self._sent[task] = storages

    def wait(self, task: object) -> Waits:
        if task not in self._handles:
            return {}
        handle, own = self._handles.pop(task)
        if handle.under_way:
            others = tuple(dict.fromkeys(message.other for message in own))
            with waiting_for(others, own[0].words):
                handle.wait()
        self._sent.pop(task, None)
        return {message.other: message.memory for message in own if not message.is_send}
        yield  # it is a generator that does not stop

    def during(self, where: Where) -> AbstractContextManager[object]:
        if where not in self._slots:
            self._slots[where] = slot(words_of(where))
        return self._in_span(where) if profiler_is_on() else self._slots[where]

    @contextmanager
    def _in_span(self, where: Where) -> Iterator[None]:
        with span(words_of(where)), self._slots[where]:
            yield


class SimulatedMessages:
    """Messages of one simulated rank.

    Args:
        rank: the rank.
        in_flight: what is under way between all ranks.
    """

    def __init__(self, rank: int, in_flight: InFlight) -> None:
        self.device = torch.device("cpu")
        self._rank, self._in_flight = rank, in_flight
        self._open: dict[object, list[Message]] = defaultdict(list)

    def buffer(self, bytes: int) -> torch.Tensor:
        return torch.empty(bytes, dtype=torch.uint8)

    def release(self, buffer: torch.Tensor) -> None:
        """Overwrite the memory, so that a reader that comes too late is found."""
        buffer.fill_(0xFF)

    def start(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.is_send:
                self._in_flight.send((self._rank, message.other, message.tag), message.memory.clone())
            self._open[message.task].append(message)

    def wait(self, task: object) -> Waits:
        received: dict[int, torch.Tensor] = {}
        for message in self._open.pop(task, ()):
            if message.is_send:
                continue
            channel = message.other, self._rank, message.tag
            yield Until(partial(self._in_flight.has_come, channel), message.words, (message.other,))
            _, box = self._in_flight.receive(channel)
            if len(box) != len(message.memory):
                raise RuntimeError(
                    f"rank {self._rank} receives {len(message.memory)} bytes in {message.words}, and rank "
                    f"{message.other} sends {len(box)}"
                )
            message.memory.copy_(box)
            received[message.other] = message.memory
        return received

    def during(self, where: Where) -> AbstractContextManager[object]:
        return nullcontext()  # simulated ranks take turns in one process


# -- messages that look at a clock -------------------------------------------------------------------------------------
#
# Record when each slot of a rank begins and ends, and how long the rank waits: messages that look at a clock.
#
#     with recording() as recorder:               rank 1:  wait    FR00 of stage 1 from stage 0            0.1 – 0.8 ms
#         step(batch)                       →              compute FW00 of stage 1 (micro-batch 0)         0.8 – 1.9 ms
#                                                          launch  FS00 of stage 1 to stage 2              1.9 – 2.0 ms
#
# They stand in the place of the rank's messages in a recorded step alone, so other steps take no time for it.


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
    def during(self, where: Where) -> Iterator[None]:
        """Record a block. A pass begins when it has what it waits for."""
        begin, before, self._waited = self._now(), self._waited, None
        with self._messages.during(where):
            yield
        launches = isinstance(where, tuple) and not isinstance(where, Task)
        tasks = () if isinstance(where, str) else where if launches else (where,)
        ready = begin if self._waited is None else self._waited
        self._waited = before if self._waited is None else self._waited
        self._add(words_of(where), "start" if launches else "compute", ready, tasks)

    def _add(self, words: str, kind: LineKind, begin: Any, tasks: tuple[Any, ...]) -> None:
        end = self._now()
        if kind == "wait":
            self._waited = end
        peers = tuple(self._peers.get(task, ()) for task in tasks)
        self._slots.append(RecordedSlot(words, kind, begin, end, tasks, peers))
