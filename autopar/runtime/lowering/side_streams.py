"""Start collectives on CUDA from side streams, so that each waits for its operands alone.

A collective of ProcessGroupNCCL runs on a stream of its group, and waits for all work that the calling stream was given
before (``syncStream`` in torch's ProcessGroupNCCL.cpp). So an event is recorded right after the operand is computed,
and the collective is called from a side stream, which waits for that event alone:

    mm = torch.ops.aten.mm.default(x, w)
    mm_tp_ready = recorded()
    z = torch.ops.aten.relu.default(v)                                     # the all-reduce runs beside it
    mm_tp_start = start_all_reduce_aside(mm, 'sum', '3', ready=mm_tp_ready)
    wait_aside(mm_tp_start, '3')
    mm_tp = wait(mm_tp_start)

Each process group has one side stream, because its collectives run one after the other. A start that stands right after
its operand is called from the calling stream: no other work is between them, and all memory belongs to one stream.

CUDA's allocator reuses memory in the order of the stream that it was allocated on. So

* copies and results are allocated on the side stream, which uses them first. In memory of the calling stream they could
  overwrite data that a computation after the event still reads.
* after each start the calling stream waits for the side stream: for its copies, not for the collective. Then the
  operand may be freed. torch keeps the memory that NCCL reads and writes until the wait (pytorch#148590).
* the side stream waits for the collective first, because the wait frees the copies, whose memory the side stream may
  reuse. The calling stream then waits for the side stream.
* results are read on the calling stream, hence ``record_stream``: their memory is reused after the last reader.

This was checked on a CPU, with streams that are recorded and simulated (``tests/unit/runtime/test_side_streams.py``).
The tests that need a GPU have not been run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from autopar.ir.nodes import operands, record_of
from autopar.runtime.lowering.body import Body
from autopar.runtime.lowering.reduction import Calls
from autopar.runtime.marks import wait_begins, wait_ends
from autopar.torch_private import FUNCTIONAL

Start = Callable[..., torch.Tensor]


class SideStreams:
    """The side streams of a process.

    Args:
        cuda: ``torch.cuda``, or a stand-in for it.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self.cuda = cuda
        self._streams: dict[str, Any] = {}  # name of a process group → its side stream
        self._starts: dict[Start, Start] = {}
        # bound once, because generated code refers to an object by its identity
        self.record, self.wait = self.recorded, self.wait_aside

    def recorded(self) -> Any:
        """Record an event on the calling stream."""
        return self.cuda.current_stream().record_event()

    def aside(self, start: Start) -> Start:
        """Return a function that starts a collective from the side stream of its group.

        Args:
            start: starts it from the calling stream; its last argument is the name of the group. The returned function
                also takes ``ready``, the event that the side stream waits for.
        """
        if start not in self._starts:
            self._starts[start] = _Aside(self, start)
        return self._starts[start]

    def wait_aside(self, started: torch.Tensor, group: str) -> None:
        """Let the calling stream wait for a collective, through the side stream. The host does not wait."""
        side, calling, begun = self.of(group), self.cuda.current_stream(), wait_begins()
        with self.cuda.stream(side):
            FUNCTIONAL.wait_tensor(started)  # the next one finds nothing to wait for
        calling.wait_stream(side)
        wait_ends(begun)
        started.record_stream(calling)

    def of(self, group: str) -> Any:
        """Return the side stream of a process group."""
        if group not in self._streams:
            self._streams[group] = self.cuda.Stream()
        return self._streams[group]


class _Aside:
    """A function that starts a collective from a side stream. ``start``: one that starts it from the calling stream."""

    def __init__(self, sides: SideStreams, start: Start) -> None:
        self.sides, self.start = sides, start
        self.__name__, self.__module__ = f"{start.__name__}_aside", start.__module__
        self.__qualname__ = self.__name__

    def __call__(self, *args: Any, ready: Any) -> torch.Tensor:
        cuda, side = self.sides.cuda, self.sides.of(args[-1])
        side.wait_event(ready)
        with cuda.stream(side):
            started = self.start(*args)
        cuda.current_stream().wait_stream(side)
        return started


SIDES = SideStreams()


def side_streams_of(device: torch.device) -> SideStreams | None:
    """Return the side streams of a device; ``None`` on a CPU, which has no streams."""
    return SIDES if device.type == "cuda" else None


def started_by(target: Any) -> Any:
    """Return the function that starts a collective from the calling stream, for one that ``aside`` has returned."""
    return target.start if isinstance(target, _Aside) else target


# -- the starts in a function ------------------------------------------------------------------------------------------
#
# Write the starts of collectives into a function: on a CPU a call, on CUDA an event and a call from a side stream.
#
# On CUDA an event is recorded right after the last call that computes an operand, and the calling stream waits for the
# side stream before the result is read (``side_streams``). Casts of operands stand before the event.


Sent = tuple[list[fx.Node], fx.Node | None]
"""The operands of a message, and the event after the last of them; ``None`` if it starts from the calling stream."""


class Starts:
    """Writes the starts of one function.

    Args:
        device: the device on which collectives run.
    """

    def __init__(self, body: Body, device: torch.device) -> None:
        self.body, self.sides = body, side_streams_of(device)
        self.aside: set[fx.Node] = set()  # messages that are started from a side stream

    def take_under_way(self, value: fx.Node) -> None:
        """Take a message that the run before has started. On CUDA it counts as started from a side stream."""
        if self.sides is not None:
            self.aside.add(value)

    def sent(self, members: Sequence[fx.Node], names: Iterable[str], before: Calls) -> Sent:
        """Write the functions that are applied to the operands of a message before it starts.

        Args:
            members: the lines that start it.
            names: a name for each operand.
            before: the functions that are applied to each.
        """
        body, last = self.body, self.overtaken(members)
        with nullcontext() if last is None else body.graph.inserting_before(last.next):
            values = [body.calls(node, name, body.operand(node), before)
                      for node, name in zip(members, names, strict=True)]  # fmt: skip
            if last is None or self.sides is None:
                return values, None
            name = f"{operands(members[0])[0].name}_ready"
            return values, body.graph.create_node("call_function", self.sides.record, name=name)

    def overtaken(self, members: Sequence[fx.Node]) -> fx.Node | None:
        """Return the last call that computes an operand of a message, if other calls stand between it and the start.

        ``None`` if no others do, where there are no streams, and for a collective that is waited for at once.
        """
        if self.sides is None or not record_of(members[0]).started:
            return None
        last = self.body.written_by(self.body.operand(node) for node in members)
        return None if self.body.lines.get(last, -1) == len(self.body.lines) - 1 else last

    def call(self, node: fx.Node, name: str, start: Callable[..., Any], args: tuple[Any, ...], sent: Sent) -> fx.Node:
        """Write the call that starts a message."""
        _, ready = sent
        if ready is None or self.sides is None:
            return self.body.call(node, name, start, args)
        value = self.body.call(node, name, self.sides.aside(start), args, {"ready": ready})
        self.aside.add(value)
        return value

    def wait(self, started: fx.Node, group: str) -> None:
        """Write the wait of the calling stream for a message that is started from a side stream."""
        assert self.sides is not None
        self.body.graph.call_function(self.sides.wait, (started, group))
