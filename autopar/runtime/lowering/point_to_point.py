"""Run messages between ranks: post receives, launch sends, and wait for them, each as a call of its own.

``start`` returns a handle at once, and its ``wait`` blocks until the messages of a handle are done. Callers must know
how torch 2.13 behaves in between:

* gloo never buffers: a send is done when the other rank has received it, whatever its size. So all ranks must be shown
  to finish without buffers (``autopar.verify.channels``).
* On gloo a short message leaves the tail of a longer buffer as it was, without an error, and a long one aborts the
  receiver. Both ends take their sizes from one plan (``packing``), and ``channels`` compares the bytes of both ends
  before anything runs.
* NCCL runs the messages of a group one batch after the other. Ranks that send to each other issue both in one batch.
* A message is not done before ``wait``: ``is_completed`` of torch's work stays false until then.
* A wait that times out closes the connection of the two ranks for good: nothing can be sent on this group again.

These are plain sends and receives. torch's functional ones never free what they have sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import distributed

from autopar.runtime.lowering.packing import Packing, as_bytes, from_bytes, new_piece, size_of, take
from autopar.runtime.lowering.tags import UNTAGGED
from autopar.runtime.marks import wait_begins, wait_ends
from autopar.torch_private import group_named


class MessageEnd(NamedTuple):
    """One end of a message: the other rank of it, and the memory that it is sent from or received in, contiguous."""

    is_send: bool
    other: int
    memory: torch.Tensor


class Handle:
    """Messages under way. ``wait`` takes it once.

    Until then ``under_way`` lists the handle and keeps the memory of its messages. So no backend reads or writes memory
    that has been freed, even if the caller drops the handle.
    """

    def __init__(self, messages: Sequence[MessageEnd], works: Sequence[distributed.Work]) -> None:
        self._messages, self._works = tuple(messages), tuple(works)
        _under_way[id(self)] = self

    @property
    def received(self) -> tuple[torch.Tensor, ...]:
        """The memory of its receives, in their order."""
        return tuple(message.memory for message in self._messages if not message.is_send)

    @property
    def under_way(self) -> bool:
        """Whether nothing has waited for the messages yet."""
        return id(self) in _under_way

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Wait for all messages, and let go of their memory. Returns what was received."""
        if _under_way.pop(id(self), None) is None:
            raise RuntimeError("these messages have been waited for; each handle is waited for once")
        begun = wait_begins()
        for work in self._works:
            work.wait()
        wait_ends(begun)
        received, self._messages, self._works = self.received, (), ()
        return received


_under_way: dict[int, Handle] = {}


def under_way() -> tuple[Handle, ...]:
    """Return the handles that nothing has waited for."""
    return tuple(_under_way.values())


def start(messages: Sequence[MessageEnd], group: str | None = None, tag: int = UNTAGGED) -> Handle:
    """Start sends and receives in their order: on a GPU as one batch.

    Args:
        group: the name of a process group that has the ranks; ``None``: the default group.
        tag: a number that the other end gives too (``tags``).
    """
    where = None if group is None else group_named(group)
    if all(message.memory.device.type == "cpu" for message in messages):  # gloo has no batches
        works = [
            (distributed.isend if is_send else distributed.irecv)(memory, other, where, tag)
            for is_send, other, memory in messages
        ]
        return Handle(messages, [work for work in works if work is not None])
    operations = [
        distributed.P2POp(distributed.isend if is_send else distributed.irecv, memory, other, where, tag)
        for is_send, other, memory in messages
    ]
    return Handle(messages, distributed.batch_isend_irecv(operations))


def exchange_between_stages(
    x: torch.Tensor | None, plan: Packing, dtype: torch.dtype, device: torch.device, group: str | None = None
) -> torch.Tensor:
    """Send and receive the messages of a plan, all at the same time, and wait.

    A rank that only sends returns its own piece.

    Args:
        x: this rank's old piece, if it has one.
        plan: what it sends and receives.
        dtype, device: those of the new piece.
        group: as of ``start``.
    """
    assert x is not None or not plan.sends
    boxes = [] if x is None else [(receiver, as_bytes(take(x, places))) for receiver, places in plan.sends]
    buffers = [
        (sender, torch.empty(size_of(places) * dtype.itemsize, dtype=torch.uint8, device=device))
        for sender, places in plan.receives
    ]
    ends = [MessageEnd(is_send, *(boxes if is_send else buffers)[k]) for is_send, k in plan.order]
    received = start(ends, group).wait()
    if plan.shape is None:
        assert x is not None
        return x
    return new_piece(plan, dtype, device, x, [from_bytes(box, dtype) for box in received])
