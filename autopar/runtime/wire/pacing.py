"""Make computing take at least given durations, so that a schedule can be measured where processes share cores.

A ``Pacer`` is a clock of the compute stream of one process. ``begin`` is called where a segment of computing begins,
such as after a wait, and ``computed`` where it ends, such as before the next start or wait. A ``Pacing`` writes these
calls between the lines of a lowered function:

y = mm(x, w)                     y = mm(x, w)
y_tp_start = start_…(y)    →     computed(0.002)
z = relu(v)                      y_tp_start = start_…(y)
y_tp = finish_…(y_tp_start)      z = relu(v)
                                 computed(0.001)
                                 y_tp = finish_…(y_tp_start)
                                 begin()
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.costs.calls import EXCHANGE, kind_of
from autopar.costs.durations import durations
from autopar.errors import shown
from autopar.ir.program import Program
from autopar.runtime.wire.clock import now, sleep_until
from autopar.runtime.wire.report import Counts
from autopar.runtime.wire.wire_groups import EMULATED


class Pacer:
    """The compute clock of this process.

    A segment ends no earlier than its begin plus its seconds. Where real computing takes longer, the excess is counted
    as late, and the clock goes on from the real end. Where the pacer sleeps too long, the next segment is shorter by
    as much.

    Args:
        durations: seconds of named segments, such as the F, B and W slots of a pipeline.
        counts: what late seconds are added to.
    """

    def __init__(
        self, durations: Mapping[str, float], counts: Counts, clock: Callable[[], float] = now,
        sleep: Callable[[float], None] = sleep_until,
    ) -> None:  # fmt: skip
        for name, seconds in durations.items():
            _check(seconds, f"pace: the duration of {shown(name)}")
        self.durations = dict(durations)
        self._counts, self._clock, self._sleep = counts, clock, sleep
        self._at = clock()

    def begin(self) -> None:
        """Begin a segment of computing."""
        self._at = self._clock()

    def computed(self, segment: str | float) -> None:
        """End a segment of computing: sleep until its floor, and begin the next one.

        Args:
            segment: its name in ``durations``, or its seconds.

        Raises:
            ValueError: no such name, or seconds that are not finite or below 0.
        """
        if isinstance(segment, str):
            seconds = self._named(segment)
        else:
            seconds = segment
            _check(seconds, "the duration of a segment")
        floor, real = self._at + seconds, self._clock()
        if real > floor:
            self._counts.late(floor, real)
            self._at = real
        else:
            self._sleep(floor)
            self._at = floor

    def _named(self, segment: str) -> float:
        if segment not in self.durations:
            near = difflib.get_close_matches(segment, self.durations, 3) or list(self.durations)[:3]
            hint = f"; did you mean {', '.join(near)}?" if near else "; emulate was given no durations"
            raise ValueError(f"pace has no segment {segment!r}{hint}")
        return self.durations[segment]


def _check(seconds: float, what: str) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
        raise ValueError(f"{what} is a number of seconds ≥ 0, not {shown(seconds)}")


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
