"""Make computing take at least given durations, so that a schedule can be measured where processes share cores.

A pacer is a clock of the compute stream of one process. Generated code calls ``begin`` where a segment of computing
begins, such as after a wait, and ``computed`` where it ends, such as before the next start or wait.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping

from autopar.errors import shown
from autopar.runtime.wire.clock import now, sleep_until
from autopar.runtime.wire.report import Counts


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
