"""Pace the computing of a lowered function: write the calls of the ``Pacer`` between its lines.

y = mm(x, w)                     y = mm(x, w)
y_tp_start = start_…(y)    →     computed(0.002)
z = relu(v)                      y_tp_start = start_…(y)
y_tp = finish_…(y_tp_start)      z = relu(v)
                                 computed(0.001)
                                 y_tp = finish_…(y_tp_start)
                                 begin()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.costs.calls import EXCHANGE, kind_of
from autopar.costs.durations import durations
from autopar.ir.program import Program
from autopar.runtime.wire.wire_groups import EMULATED


@dataclass
class Pacing:
    """Writes the paces of one function.

    Attributes:
        begin, computed: functions of the process's ``Pacer``.
        seconds: value → the seconds of the op that computes it.
        segment: the seconds of the lines since the last pace.
    """

    begin: Callable[[], None]
    computed: Callable[[float], None]
    seconds: Mapping[str, float]
    segment: float = field(default=0.0, init=False)

    def add(self, node: fx.Node) -> None:
        """Count a line that computes."""
        self.segment += self.seconds.get(node.name, 0.0)

    def end(self, graph: fx.Graph) -> None:
        """Write the end of a segment, which takes at least its seconds."""
        graph.call_function(self.computed, (self.segment,))
        self.segment = 0.0

    def start(self, graph: fx.Graph) -> None:
        """Write the begin of a segment, after a wait."""
        graph.call_function(self.begin)


def pacing_of(explicit: Program, zeros: Iterable[str] = ()) -> Pacing | None:
    """Return the pacing of an explicit program's functions; ``None`` if no wire paces programs.

    Args:
        zeros: states that begin as zeros.
    """
    wire = EMULATED[0] if EMULATED else None
    if wire is None or wire.figures is None:
        return None
    seconds = durations(explicit, wire.figures, zeros=zeros, strict=False).seconds
    computed = {
        node.name: seconds[node.name]
        for node in explicit.nodes
        if node.op == "call_function" and kind_of(node) != EXCHANGE  # joined chunks have the name of their collective
    }
    return Pacing(wire.pacer.begin, wire.pacer.computed, computed)
