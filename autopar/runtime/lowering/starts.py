"""Write the starts of collectives into a function: on a CPU a call, on CUDA an event and a call from a side stream.

On CUDA an event is recorded right after the last call that computes an operand, and the calling stream waits for the
side stream before the result is read (``side_streams``). Casts of operands stand before the event.
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
from autopar.runtime.lowering.side_streams import side_streams_of

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
